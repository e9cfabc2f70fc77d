"""Counts how well each step uses the device: once per step, from the step's report and the model's costs."""

from __future__ import annotations

from headway.core.step_work import StepWork
from headway.core.utilisation import UtilisationStats
from headway.engine.step_report import StepReport
from headway.models.costs import ModelCosts
from headway.worker.ceilings import Ceilings
from headway.worker.step_costs import step_flops, step_read_bytes


class UtilisationMeter:
    """Counts steps in `stats`. Without the device's ceilings, the times at them are not counted."""

    def __init__(self, costs: ModelCosts, ceilings: Ceilings | None) -> None:
        self.stats = UtilisationStats()
        self.ceilings = ceilings
        self._costs = costs
        self._s_per_byte = 0.0 if ceilings is None else 1.0 / ceilings.bandwidth_bytes_s
        self._s_per_flop = 0.0 if ceilings is None else 1.0 / ceilings.flops_s

    def take(self, report: StepReport) -> None:
        """Count a step whose result has arrived. A step that failed counts as nothing."""
        output, stats = report.snapshot.output, self.stats
        if not output.scheduled or report.error is not None:
            return
        work = StepWork.of(output)
        num_bytes, flops = step_read_bytes(work, self._costs), step_flops(work, self._costs)
        read_s, compute_s = num_bytes * self._s_per_byte, flops * self._s_per_flop
        stats.device_busy_s += report.busy_s
        stats.host_wait_s += report.host_wait_s
        stats.read_bytes += num_bytes
        stats.flops += flops
        stats.read_s += read_s
        stats.compute_s += compute_s
        stats.ceiling_s += read_s if read_s > compute_s else compute_s
        stats.num_step_tokens += work.num_tokens
        stats.num_padding_tokens += report.num_padding_tokens
