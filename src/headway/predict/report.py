"""What a training run found: how predictors order requests that none of them has learnt from, and what asking costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.predict.base import PromptView
from headway.predict.evaluation import Quality, quality
from headway.predict.features import PromptFeatures
from headway.predict.learned_ranker import LearnedRanker
from headway.predict.running_statistics import RunningStatistics
from headway.predict.traffic_log import TrafficRecord

BATCH = 64
TIMING_REPEATS = 50
MADE_UP_WORD = "word "
MADE_UP_VOCABULARY = 32_000


@dataclass(frozen=True)
class Cost:
    """Seconds per request, from token ids to a length: asked one at a time, and 64 at once. The median of many."""

    single_s: float
    batched_s: float


def compare(
    train: Sequence[TrafficRecord], held_out: Sequence[TrafficRecord], ranker: LearnedRanker
) -> dict[str, Quality]:
    """Of each predictor on held-out requests. Statistics see the training part once, in its order."""
    actual = [record.num_output_tokens for record in held_out]
    statistics = RunningStatistics()
    for record in train:
        statistics.observe_keys(record.features.keys, record.num_output_tokens)
    keys = [record.features.keys for record in held_out]
    return {
        "prompt length": quality([each.num_prompt_tokens for each in keys], actual),
        "running statistics": quality([statistics.predict_keys(each) for each in keys], actual),
        "learned ranker": quality(ranker.predict_features([record.features for record in held_out]), actual),
    }


def measure_cost(
    ranker: LearnedRanker, sample: Sequence[PromptFeatures], now: Callable[[], float] = time.perf_counter
) -> Cost:
    """On prompts as long as those of the sample, with text where these had it."""
    prompts = [_made_up(sample[i % len(sample)], i) for i in range(BATCH)]

    def timed(batch: Sequence[PromptView]) -> float:
        started_s = now()
        ranker.predict(batch)
        return now() - started_s

    ranker.predict(prompts)
    singles = sorted(timed([prompts[i % BATCH]]) for i in range(TIMING_REPEATS))
    batches = sorted(timed(prompts) for _ in range(TIMING_REPEATS // 5))
    return Cost(singles[len(singles) // 2], batches[len(batches) // 2] / BATCH)


def _made_up(like: PromptFeatures, number: int) -> PromptView:
    """A prompt of the same size; logs need not hold the real tokens."""
    length = max(like.keys.num_prompt_tokens, 1)
    return PromptView(
        [(7919 * (number + 1) * (place + 3)) % MADE_UP_VOCABULARY for place in range(length)],
        max_tokens=like.keys.max_tokens,
        text=None if like.cues is None else MADE_UP_WORD * length,
    )
