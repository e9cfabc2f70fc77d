"""Why a simulated step does not take exactly what the cost model says: the spread of steps, and a machine's ups and
downs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from headway.core import SchedulerOutput
from headway.executor.simulated import StepTime, VirtualClock
from headway.lab.sim.cost_model import CostModel


@dataclass(frozen=True)
class Variation:
    """None, unless something is given."""

    seed: str | None = None
    """Steps spread around their mean as the measured ones did, drawn with this seed."""
    speed: Callable[[float], float] | None = None
    """Time → how many times as long everything takes by then."""

    def step_time(self, cost: CostModel, clock: VirtualClock) -> StepTime:
        """The time of a step, on a device with this clock."""
        step_s: StepTime = cost.step_s
        speed = self.speed
        if self.seed is not None and len(cost.spread) > 1:
            step_s = _spread(step_s, cost.spread, random.Random(self.seed))
        if speed is None:
            return step_s
        return lambda output: speed(clock.now_s) * step_s(output)


def _spread(step_s: StepTime, quantiles: tuple[float, ...], rng: random.Random) -> StepTime:
    draw, num_parts = rng.random, len(quantiles) - 1

    def drawn_s(output: SchedulerOutput) -> float:
        place = draw() * num_parts
        below = int(place)
        return (quantiles[below] + (quantiles[below + 1] - quantiles[below]) * (place - below)) * step_s(output)

    return drawn_s
