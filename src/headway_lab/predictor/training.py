"""Training of the learned ranker. Measurements choose the objective and the number of trees.

Two objectives are tried. `regression` fits a root of the length; `lambdarank` fits the order inside random groups of
requests, as a scheduler sees them in its queue. Each is trained on all folds but one and predicts that one, in turn;
folds do not divide conversations. The objective and the number of trees with the highest Kendall tau there are chosen,
and the final model is trained on everything. The scores of the held-back folds also make the table from score to
length, because the scores of requests that a model was trained on are too good.

Training depends only on the log and the seed, and uses one thread, so the same log gives the same model.

The length of a cut answer is not known, only that it is at least the generated tokens. Taking the cut as the length
would teach that prompts sent with a small `max_tokens` have short answers. Instead the logarithm of such a length is
replaced by its mean over answers that continued past the cut, E[log L | L > cut]. The distribution of L is Kaplan and
Meier's estimate, which uses cut answers up to their cut. If no answer is known to have continued past the cut, the cut
itself is taken.

Turns of one conversation, and repetitions of one question, must not be on both sides of a split. A log has no ids of
conversations, but the turns of one begin alike. So a request's group is the shortest beginning that few others share;
beginnings that many share are a system prompt or a template. If all of its beginnings are common, it is grouped only
with equal requests.

The table from score to length is made from requests that the model had not seen: sorted by score and cut into groups of
equal size, each group gives a point (mean score, mean log length), made to rise strictly where chance has it fall.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.predict.base import TrafficLogError
from headway.predict.features import PromptFeatures, feature_matrix
from headway.predict.predictors import expected_length, import_lightgbm
from headway.predict.ranker_file import OUTER_RISE, RankerModel, ScoreCalibration, without_parameters
from headway.predict.traffic_log import TrafficRecord

MOST_TURNS = 16
MOST_SHARE = 0.005
"""A beginning is common if more requests than this share of all, and than `MOST_TURNS`, have it."""

OBJECTIVES = ("regression", "lambdarank")
LEAST_RECORDS = 100
NUM_FOLDS = 4
NUM_TREES = (50, 100, 150, 200, 300, 400)
"""The numbers of trees that are tried."""
QUEUE_SIZE = 64
"""The number of requests that lambdarank compares with each other."""
ROOT = 0.25
"""Regression fits this power of the length. The mean wait is least in order of expected lengths, to which the rare very
long answers add much, and Kendall tau is highest in order of logarithms, to which they add little. This is in between:
it loses a hundredth of tau and wins a tenth of the wait for the first token (benchmarks/RESULTS.md)."""
NUM_GRADES = 31
"""The number of grades of length into which lambdarank's requests are sorted; LightGBM allows no more without a table
of gains."""

_COMMON = {
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 20,
    "feature_fraction": 0.2,
    "path_smooth": 10.0,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
    "max_bin": 63,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "verbosity": -1,
}
_OWN: dict[str, dict[str, Any]] = {
    "regression": {"objective": "regression"},
    "lambdarank": {
        "objective": "lambdarank",
        "lambdarank_truncation_level": QUEUE_SIZE,
        "label_gain": list(range(NUM_GRADES)),
    },
}

Floats = npt.NDArray[np.float64]

MOST_POINTS = 24
LEAST_GROUP = 25
MOST_SHIFT = 1.0
SHIFT_STEPS = 20


@dataclass(frozen=True, slots=True)
class PairCounts:
    """For how many of all pairs of requests the prediction has the true order."""

    concordant: int
    discordant: int
    tied_truth: int
    """Pairs of truly equal lengths; `tied_both` among them."""
    tied_prediction: int
    tied_both: int

    @property
    def kendall_tau(self) -> float:
        """Tau-b: 1 for the same order, 0 for no relation, -1 for the reverse; it allows for ties on either side."""
        total = self._num_comparable + self.tied_truth
        scale = math.sqrt((total - self.tied_truth) * (total - self.tied_prediction))
        return (self.concordant - self.discordant) / scale if scale else 0.0

    @property
    def accuracy(self) -> float:
        """Share of pairs of different lengths that are ordered right; a pair with equal predictions is half right."""
        half = (self.tied_prediction - self.tied_both) / 2
        return (self.concordant + half) / self._num_comparable if self._num_comparable else 0.5

    @property
    def _num_comparable(self) -> int:
        return self.concordant + self.discordant + self.tied_prediction - self.tied_both


def count_pairs(predicted: Sequence[float], actual: Sequence[float]) -> PairCounts:
    """Count the pairs from scipy's tau-b and the numbers of ties."""
    from scipy.stats import kendalltau

    num_pairs = len(predicted) * (len(predicted) - 1) // 2
    tied_truth, tied_prediction = _num_ties(actual), _num_ties(predicted)
    tied_both = _num_ties(zip(predicted, actual, strict=True))
    num_untied = num_pairs - tied_truth - tied_prediction + tied_both
    scale = math.sqrt((num_pairs - tied_truth) * (num_pairs - tied_prediction))
    # tau-b = (concordant - discordant) / scale
    surplus = round(scale * kendalltau(predicted, actual).statistic) if scale else 0
    return PairCounts(
        concordant=(num_untied + surplus) // 2,
        discordant=(num_untied - surplus) // 2,
        tied_truth=tied_truth,
        tied_prediction=tied_prediction,
        tied_both=tied_both,
    )


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of one predictor on some requests."""

    kendall_tau: float
    accuracy: float
    """The accuracy of the order of pairs."""
    log_error: float
    """Mean absolute difference of the logarithms: 0.69 is a factor of two."""
    bias: float
    """Sum of the predicted lengths over the sum of the true ones."""


def quality(predicted: Sequence[float], actual: Sequence[float]) -> Quality:
    pairs = count_pairs(predicted, actual)
    guesses, truths = np.maximum(np.asarray(predicted, float), 1), np.maximum(np.asarray(actual, float), 1)
    return Quality(
        kendall_tau=pairs.kendall_tau,
        accuracy=pairs.accuracy,
        log_error=float(np.abs(np.log(guesses) - np.log(truths)).mean()),
        bias=float(guesses.sum() / truths.sum()),
    )


def _num_ties(values: Iterable[object]) -> int:
    """The number of pairs of equal values."""
    return sum(count * (count - 1) // 2 for count in Counter(values).values())


def log_lengths(num_output_tokens: npt.ArrayLike, is_cut: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The logarithm of each length; for cut answers, its expected value."""
    logs = np.log(np.maximum(np.asarray(num_output_tokens, dtype=np.float64), 1.0))
    cut = np.asarray(is_cut, dtype=bool)
    times, mass = _distribution(logs, cut)
    # Sums of the mass, and of mass times log, beyond each point of the distribution.
    mass_beyond = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    sum_beyond = np.append(np.cumsum((mass * times)[::-1])[::-1], 0.0)
    place = np.searchsorted(times, logs, side="right")
    found = mass_beyond[place] > 0
    mean_beyond = np.divide(sum_beyond[place], mass_beyond[place], out=logs.copy(), where=found)
    return np.where(cut, np.maximum(mean_beyond, logs), logs)


def _distribution(logs: npt.NDArray[np.float64], cut: npt.NDArray[np.bool_]) -> tuple[npt.NDArray, npt.NDArray]:
    """Where answers ended, in rising order, and the estimated share of answers that end there.

    What is left beyond the last answer that ended, because longer ones were cut, is put at the longest cut."""
    times, ended = np.unique(logs[~cut], return_counts=True)
    at_risk = len(logs) - np.searchsorted(np.sort(logs), times, side="left")
    survival = np.cumprod(1.0 - ended / at_risk)
    mass = np.concatenate(([1.0], survival))[:-1] - survival
    left = survival[-1] if len(survival) else 1.0
    longest = logs.max(initial=0.0)
    return np.append(times, longest), np.append(mass, left)


def group_draws(features: Sequence[PromptFeatures], seed: int) -> list[float]:
    """A number in [0, 1) for each request, the same for all requests of a group."""
    most = max(MOST_TURNS, MOST_SHARE * len(features))
    counts = Counter(head for each in features for head in enumerate(each.keys.heads))
    draws = []
    for each in features:
        rare = next((head for head in enumerate(each.keys.heads) if counts[head] <= most), None)
        group = each.grams if rare is None else repr(rare).encode()
        digest = hashlib.blake2b(group, digest_size=8, key=seed.to_bytes(16, "little", signed=True))
        draws.append(int.from_bytes(digest.digest(), "little") / 2**64)
    return draws


@dataclass(frozen=True)
class TrainedRanker:
    """The model, and the Kendall tau that each objective reached on held-back folds."""

    model: RankerModel
    tau_by_objective: dict[str, float]


@dataclass(frozen=True)
class _Trial:
    tau: float
    num_trees: int
    scores: Floats
    """The score of each request, from a model that was not trained on it."""


def split_records(
    records: Sequence[TrafficRecord], share: float, seed: int
) -> tuple[list[TrafficRecord], list[TrafficRecord]]:
    """The records to train on, and about the given share of them held out. Conversations stay together."""
    is_held_out = [draw < share for draw in group_draws([record.features for record in records], seed)]
    kept = [record for record, out in zip(records, is_held_out) if not out]
    return kept, [record for record, out in zip(records, is_held_out) if out]


def train_ranker(
    records: Sequence[TrafficRecord],
    *,
    seed: int = 0,
    objectives: Sequence[str] = OBJECTIVES,
    progress: Callable[[int, int], None] | None = None,
) -> TrainedRanker:
    """Train on these records; `TrafficLogError` if they are too few or all alike. `progress`: (models trained, of how
    many)."""
    if len(records) < LEAST_RECORDS:
        raise TrafficLogError(f"{len(records)} usable requests are too few to learn from; {LEAST_RECORDS} are needed.")
    features = [record.features for record in records]
    matrix = feature_matrix(features)
    actual = np.array([record.num_output_tokens for record in records], dtype=np.float64)
    targets = log_lengths(actual, [record.is_cut for record in records])
    if np.ptp(targets) == 0:
        raise TrafficLogError("All answers are equally long; there is nothing to learn.")
    folds = np.array([int(draw * NUM_FOLDS) for draw in group_draws(features, seed + 1)])
    num_fits, num_done = len(objectives) * len(set(folds.tolist())) + 1, 0

    def note() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done, num_fits)

    trials = {name: _try(name, matrix, targets, actual, folds, seed, note) for name in objectives}
    best = max(objectives, key=lambda name: trials[name].tau)
    booster = _fit(best, matrix, targets, trials[best].num_trees, seed)
    note()
    scores = trials[best].scores
    limits = [each.keys.max_tokens for each in features]
    taus = {name: trial.tau for name, trial in trials.items()}
    model = RankerModel(
        objective=best,
        booster_text=without_parameters(booster.model_to_string()),
        calibration=centred(calibrate(scores, targets), scores, limits, actual),
        training={
            "num_requests": len(records),
            "num_cut": sum(record.is_cut for record in records),
            "num_with_text": sum(each.cues is not None for each in features),
            "num_trees": trials[best].num_trees,
            "seed": seed,
            "fold_kendall_tau": {name: round(tau, 4) for name, tau in taus.items()},
        },
    )
    return TrainedRanker(model, taus)


def _try(
    objective: str,
    matrix: npt.NDArray[np.float32],
    targets: Floats,
    actual: Floats,
    folds: npt.NDArray[np.int_],
    seed: int,
    note: Callable[[], None],
) -> _Trial:
    """Train without each fold in turn, and find the number of trees that orders the left-out requests best."""
    scores = np.zeros((len(NUM_TREES), len(targets)))
    taus = []
    for fold in sorted(set(folds.tolist())):
        held = folds == fold
        booster = _fit(objective, matrix[~held], targets[~held], NUM_TREES[-1], seed)
        for i, num_trees in enumerate(NUM_TREES):
            scores[i, held] = booster.predict(matrix[held], raw_score=True, num_iteration=num_trees, num_threads=1)
        taus.append([count_pairs(row[held].tolist(), actual[held].tolist()).kendall_tau for row in scores])
        note()
    means = np.mean(taus, axis=0)
    best = int(np.argmax(means))
    return _Trial(float(means[best]), NUM_TREES[best], scores[best])


def _fit(objective: str, matrix: npt.NDArray[np.float32], targets: Floats, num_trees: int, seed: int) -> Any:
    lightgbm = import_lightgbm()
    parameters = {**_COMMON, **_OWN[objective], "seed": seed}
    if objective == "lambdarank":
        order = np.random.default_rng(seed).permutation(len(targets))
        sizes = [len(part) for part in np.array_split(order, -(-len(order) // QUEUE_SIZE))]
        data = lightgbm.Dataset(matrix[order], label=_grades(targets)[order], group=sizes, params=parameters)
    else:
        data = lightgbm.Dataset(matrix, label=np.exp(ROOT * targets), params=parameters)
    return lightgbm.train(parameters, data, num_boost_round=num_trees)


def _grades(targets: Floats) -> npt.NDArray[np.int_]:
    """A grade for each target: 0 for the shortest, NUM_GRADES - 1 for the longest. Grades have about equally many
    targets, and equal lengths have equal grades."""
    place = np.searchsorted(np.sort(targets), targets, side="left")
    return (place * NUM_GRADES // len(targets)).astype(np.int_)


def calibrate(scores: Floats, log_lengths: Floats) -> ScoreCalibration:
    """A table for these scores, which must come from models that were not trained on the requests."""
    order = np.argsort(scores, kind="stable")
    num_points = int(np.clip(len(scores) // LEAST_GROUP, 2, MOST_POINTS))
    groups = [group for group in np.array_split(order, num_points) if len(group)]
    points = _rising(
        [float(scores[group].mean()) for group in groups], [float(log_lengths[group].mean()) for group in groups]
    )
    table = ScoreCalibration(tuple(x for x, _ in points), tuple(y for _, y in points), sigma=0.0)
    sigma = float(np.sqrt(np.mean((table.log_lengths_of(scores) - log_lengths) ** 2)))
    return ScoreCalibration(table.scores, table.log_lengths, sigma)


def centred(
    table: ScoreCalibration, scores: Floats, max_tokens: Sequence[int | None], num_output_tokens: Floats
) -> ScoreCalibration:
    """The table, shifted so that the expected lengths add up to the true ones, since lengths are log-normal only
    roughly."""
    logs = table.log_lengths_of(scores).tolist()
    wanted = float(num_output_tokens.sum())
    low, high = -MOST_SHIFT, MOST_SHIFT
    for _ in range(SHIFT_STEPS):
        shift = (low + high) / 2
        total = sum(expected_length(log + shift, table.sigma, limit) for log, limit in zip(logs, max_tokens))
        low, high = (shift, high) if total < wanted else (low, shift)
    return ScoreCalibration(table.scores, tuple(y + low for y in table.log_lengths), table.sigma)


def _rising(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Merge neighbours whose order is wrong (isotonic regression), then drop points that do not rise."""
    pools: list[tuple[float, float, int]] = []
    for x, y in zip(xs, ys):
        count = 1
        while pools and (y <= pools[-1][1] or x <= pools[-1][0]):
            past_x, past_y, past = pools.pop()
            x, y = (x * count + past_x * past) / (count + past), (y * count + past_y * past) / (count + past)
            count += past
        pools.append((x, y, count))
    if len(pools) == 1:
        # The scores say nothing: a table that hardly rises.
        x, y, _ = pools[0]
        return [(x - 0.5, y - OUTER_RISE / 2), (x + 0.5, y + OUTER_RISE / 2)]
    return [(x, y) for x, y, _ in pools]
