"""Learning curves: what a length predictor knows after so many pairs of a prompt and the length of its answer.

Made-up traffic can be learned from as real traffic can. Requests come from applications, each with a beginning of its
own and a usual length. In what follows, a few words make answers longer or shorter, and all others say nothing. Part of
a length is chance, which no predictor foresees. What an application is worth shows after some hundred pairs, what a
word is worth only after more.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.predict.base import MissingLightGBMError, PromptView
from headway.predict.features import prompt_features
from headway.predict.predictors import LearnedRanker, RunningStatistics, import_lightgbm
from headway.predict.traffic_log import TrafficRecord, read_traffic
from headway_lab.predictor.train_command import Cost, measure_cost
from headway_lab.predictor.training import OBJECTIVES, count_pairs, split_records, train_ranker


@dataclass(frozen=True)
class Traffic:
    """Pairs to learn from, in order of arrival, and others that predictions are made for."""

    pairs: Sequence[TrafficRecord]
    held_out: Sequence[TrafficRecord]

    @property
    def lengths(self) -> list[int]:
        """The true lengths of the held-out answers."""
        return [record.num_output_tokens for record in self.held_out]


@dataclass(frozen=True)
class Learned:
    """What one predictor says of the held-out requests after some pairs."""

    num_pairs: int
    lengths: Sequence[float]
    tau: float
    """Kendall's tau of these predictions with the true lengths."""
    training_s: float
    cost: Cost | None = None
    """What a prediction takes; `None` for statistics, whose cost is not worth measuring."""


def has_ranker() -> bool:
    """Whether the library that the learned ranker needs is installed."""
    try:
        import_lightgbm()
    except MissingLightGBMError:
        return False
    return True


def learn(traffic: Traffic, num_pairs: int) -> Learned:
    """Train the ranker on the first pairs, with one objective: comparing it with the other takes as long again."""
    started_s = time.perf_counter()
    ranker = LearnedRanker(train_ranker(traffic.pairs[:num_pairs], objectives=OBJECTIVES[:1]).model)
    training_s = time.perf_counter() - started_s
    features = [record.features for record in traffic.held_out]
    lengths = ranker.predict_features(features)
    return Learned(num_pairs, lengths, _tau(lengths, traffic), training_s, measure_cost(ranker, features))


def observe(traffic: Traffic, num_pairs: int) -> Learned:
    """Show the first pairs to running statistics, which learn while they serve."""
    started_s = time.perf_counter()
    statistics = RunningStatistics()
    for record in traffic.pairs[:num_pairs]:
        statistics.observe_keys(record.features.keys, record.num_output_tokens)
    training_s = time.perf_counter() - started_s
    lengths = [statistics.predict_keys(record.features.keys) for record in traffic.held_out]
    return Learned(num_pairs, lengths, _tau(lengths, traffic), training_s)


def _tau(lengths: Sequence[float], traffic: Traffic) -> float:
    return count_pairs(lengths, traffic.lengths).kendall_tau


def recorded_traffic(path: Path, *, num_held_out: int, most_pairs: int) -> Traffic:
    """The last pairs of a traffic log. Conversations are not divided between learning and testing."""
    records = read_traffic([path], most_records=most_pairs + num_held_out).records
    share = num_held_out / max(len(records), 2 * num_held_out)
    pairs, held_out = split_records(records, share, seed=0)
    return Traffic(pairs[-most_pairs:], held_out[:num_held_out])


# ---- made-up traffic ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Application:
    """Requests of one kind."""

    head: Sequence[int]
    """The tokens that all its prompts begin with."""
    log_length: float


@dataclass(frozen=True)
class _Kind:
    """What made-up traffic is like. The spreads are standard deviations of the logarithm of a length."""

    applications: int = 12
    head_tokens: int = 48
    fillers: int = 600
    tellers: int = 60
    """Words that say nothing about the length, and words that do."""
    most_told: int = 3
    """The most telling words of a prompt."""
    median: float = 150.0
    application_spread: float = 0.5
    teller_spread: float = 0.6
    chance_spread: float = 0.4
    max_tokens: int = 1_000


def made_up_traffic(num_pairs: int, num_held_out: int, *, seed: int = 0) -> Traffic:
    """Traffic that needs neither a model nor data. More pairs begin with the same ones."""
    kind, rng = _Kind(), random.Random(f"{seed}/traffic")
    tellers = {kind.fillers + word: rng.gauss(0.0, kind.teller_spread) for word in range(kind.tellers)}
    start = kind.fillers + kind.tellers
    applications = [
        _Application(
            [start + rng.randrange(kind.fillers) for _ in range(kind.head_tokens)],
            math.log(kind.median) + rng.gauss(0.0, kind.application_spread),
        )
        for _ in range(kind.applications)
    ]
    held_out = [_request(rng, kind, rng.choice(applications), tellers) for _ in range(num_held_out)]
    pairs = [_request(rng, kind, rng.choice(applications), tellers) for _ in range(num_pairs)]
    return Traffic(pairs, held_out)


def _request(rng: random.Random, kind: _Kind, own: _Application, tellers: Mapping[int, float]) -> TrafficRecord:
    told = rng.sample(sorted(tellers), rng.randint(0, kind.most_told))
    body = [*rng.choices(range(kind.fillers), k=rng.randint(10, 100)), *told]
    rng.shuffle(body)
    log_length = own.log_length + sum(tellers[word] for word in told) + rng.gauss(0.0, kind.chance_spread)
    length = max(1, round(math.exp(log_length)))
    prompt = PromptView([*own.head, *body], max_tokens=kind.max_tokens)
    return TrafficRecord(prompt_features(prompt), min(length, kind.max_tokens), length > kind.max_tokens, None)
