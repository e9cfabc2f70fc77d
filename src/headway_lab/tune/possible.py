"""Whether promises can be kept at all. A request that is alone on the machine, with the shortest prompt and answer of
the work, is served as fast as any request can be. A bound far below its latency is refused before a search begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.sim.simulate import simulate
from headway_lab.workload.bench_requests import BenchRequest

if TYPE_CHECKING:
    from headway_lab.tune.search_space import Space
    from headway_lab.tune.tune_goal import Goal


def check_possible(spaces: Sequence[Space], goal: Goal, work: Sequence[BenchRequest]) -> None:
    """`ConfigError` for a promise that not even a lone request would get on any of these machines. Steps that are
    faster than the mean, a cached prompt and guesses may make a request faster than the one that is simulated alone, so
    a bound is refused if it is below half of that one's latency."""
    lone = _shortest(work)
    found = [_lone_metrics(space, lone).as_json() for space in spaces]
    for objective in goal.objectives:
        values = [value for one in found if (value := one.get(objective.key)) is not None]
        if values and objective.bound < 0.5 * min(values):
            raise ConfigError(
                f"--slo {objective.key}={objective.bound:g} cannot be kept: the shortest request of this work, alone "
                f"on the machine, takes {min(values):.3g} ms."
            )


def _shortest(work: Sequence[BenchRequest]) -> BenchRequest:
    """The shortest prompt with the shortest answer."""
    prompt = min((request.prompt_token_ids for request in work), key=len)
    return BenchRequest(prompt, min(request.num_output_tokens for request in work))


def _lone_metrics(space: Space, request: BenchRequest) -> OnlineMetrics:
    setup = space.set_up(space.default)
    done = simulate([request], setup.machine, setup.scheduler, setup.cache, seed=None)
    return OnlineMetrics.of(done.timelines, done.duration_s)
