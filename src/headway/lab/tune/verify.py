"""The best candidates and the default on the real engine: what was predicted, and what is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.lab.bench.online_metrics import OnlineMetrics
from headway.lab.bench.replay import replay
from headway.lab.sim.check import apart, at_once
from headway.lab.tune.objective import Goal, Score
from headway.lab.tune.trial import Trial, Tuned
from headway.lab.workload.requests import BenchRequest

_WARM_UP_REQUESTS = 32

Load = Callable[[EngineConfig], LLMEngine]


@dataclass(frozen=True)
class Verified:
    """A trial that was measured, too."""

    trial: Trial
    metrics: OnlineMetrics
    score: Score


def candidates(tuned: Tuned, num_best: int) -> list[Trial]:
    """The default, and the best few that are better than it and differ from each other in what they do."""
    better = [trial for trial in tuned.distinct if trial.score.is_better_than(tuned.default.score)]
    return [tuned.default, *better[:num_best]]


def verify(
    trial: Trial,
    work: Sequence[BenchRequest],
    goal: Goal,
    *,
    options: Mapping[str, Any],
    load: Load,
    temperature: float,
) -> Verified:
    """Measure a trial on an engine of these options with the trial's over them."""
    engine = load(EngineConfig.from_options(**{**options, **trial.options}))
    try:
        # To be warm the engine must have seen steps of all sizes.
        beginning = at_once([r for r in work if r.after is None][:_WARM_UP_REQUESTS])
        replay(engine, apart(beginning, "warm-up"), temperature=temperature)
        result = replay(engine, work, temperature=temperature)
    finally:
        engine.shutdown()
        del engine
        _free()
    metrics = OnlineMetrics.of(result.timelines, result.duration_s)
    return Verified(trial, metrics, goal.score(result.timelines, metrics))


def recommended(verified: Sequence[Verified]) -> Trial:
    """Of measured trials, the default first, the one that is best in truth; the default, unless one clearly is."""
    default, *others = verified
    best = default
    for one in others:
        if one.score.is_better_than(best.score):
            best = one
    return best.trial


def _free() -> None:
    """What the engine had on the device, before the next one looks how much there is."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
