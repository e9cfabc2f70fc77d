"""What steps take from their device, counted by an engine whose clock stands still unless a test moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.core import ModelRunnerOutput, SchedulerOutput
from headway.core.utilisation import UNKNOWN, Utilisation, UtilisationStats
from headway.engine.engine_core import EngineCore
from headway.engine.utilisation import UtilisationMeter
from headway.executor.fake import FakeExecutor, FakeStep
from headway.models.costs import ModelCosts
from headway.worker.ceilings import Ceilings
from tests.unit.clock import Clock
from tests.unit.core.driver import make_scheduler, request

COSTS = ModelCosts(
    weight_bytes=1000.0,
    kv_bytes_per_token=1.0,
    linear_flops_per_token=100.0,
    attention_flops_per_pair=1.0,
    output_flops=10_000.0,
)
CEILINGS = Ceilings(bandwidth_bytes_s=1000.0, flops_s=100_000.0)
STEP_S, HOST_S = 2.0, 0.5


class PaddedExecutor(FakeExecutor):
    """Steps take two seconds; each is padded by three tokens."""

    def __init__(self, clock: Clock, *, fails: Callable[[int], bool] = lambda step_id: False) -> None:
        super().__init__(max_in_flight=1)
        self._clock = clock
        self._fails = fails

    def _answer(self, step: FakeStep, output: SchedulerOutput) -> ModelRunnerOutput:
        self._clock.now_s += STEP_S
        result = super()._answer(step, output)
        if self._fails(output.step_id):
            raise RuntimeError("the kernel caught fire")
        return ModelRunnerOutput(result.sampled, {}, num_padding_tokens=3)


def run(*, ceilings: Ceilings | None = CEILINGS, **parts: Any) -> UtilisationStats:
    """A request of 4 tokens that gets 3: one step for its prompt and two more. The host takes half a second between."""
    clock = Clock(0.0)
    core = EngineCore(make_scheduler(), PaddedExecutor(clock, **parts), now=clock)
    meter = UtilisationMeter(COSTS, ceilings)
    clock.now_s += 100.0  # no request, so nobody waits for the host
    core.add_request(request("a", 4, max_tokens=3))
    while core.has_unfinished_requests:
        meter.take(core.step().report)
        clock.now_s += HOST_S
    return meter.stats


def test_a_request_by_hand() -> None:
    stats = run()
    assert stats.device_busy_s == 3 * STEP_S
    assert stats.host_wait_s == 2 * HOST_S
    assert stats.read_bytes == 3 * 1000 + 4 + 5 + 6
    assert stats.flops == 6 * 100 + (1 + 2 + 3 + 4) + 5 + 6 + 3 * 10_000
    assert stats.read_s == pytest.approx(3.015)
    assert stats.compute_s == pytest.approx(0.30621)
    assert stats.ceiling_s == pytest.approx(3.015), "each step is bound by its bytes"
    assert (stats.num_step_tokens, stats.num_padding_tokens) == (6, 9)
    used = Utilisation.of(stats)
    assert used.as_json() == {"bandwidth": 0.5025, "compute": 0.051, "ceiling": 0.5025, "useful": 0.4, "host": 0.1429}
    assert str(used) == (
        "bandwidth 50.3% · compute (MFU) 5.1% · of the ceilings 50.3% · useful tokens 40.0% · waits for the host 14.3%"
    )


def test_without_ceilings_there_is_no_share_of_them() -> None:
    stats = run(ceilings=None)
    assert stats.read_bytes > 0 and stats.flops > 0
    assert Utilisation.of(stats).as_json() == {"useful": 0.4, "host": 0.1429}
    assert Utilisation.of(UtilisationStats()) == UNKNOWN
    assert str(UNKNOWN) == ""


def test_a_failed_step_counts_as_nothing() -> None:
    stats = run(fails=lambda step_id: step_id == 1)
    assert (stats.device_busy_s, stats.num_step_tokens) == (STEP_S, 4)


def test_only_what_was_counted_since() -> None:
    stats = UtilisationStats(device_busy_s=1.0, num_step_tokens=5)
    before = stats.copy()
    stats.device_busy_s += 2.0
    stats.num_step_tokens += 1
    assert stats.since(before) == UtilisationStats(device_busy_s=2.0, num_step_tokens=1)
    assert before == UtilisationStats(device_busy_s=1.0, num_step_tokens=5)
