"""How much of what a machine can do at most a run took, and how much of that for tokens that were asked for.

Flops and bytes are those of `headway.worker.step_costs`, summed up over requests: a request with a prompt of p tokens
and an answer of n computes p + n − 1 rows, each of which is compared with all before it. Its first step reads its p
keys and values, and each later one those of all tokens so far. Weights are read once for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.core.step_work import StepWork
from headway.worker.step_costs import planned_costs, step_flops
from headway_lab.claims.run import Run
from headway_lab.workload.bench_requests import Work

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.worker.ceilings import Ceilings


@dataclass(frozen=True)
class MachineShares:
    """Shares of the machine's ceilings, over the whole run."""

    bandwidth: float
    compute: float
    useful_compute: float
    """Of arithmetic, without that of padding."""


def machine_shares(run: Run, work: Work, engine: LLMEngine, ceilings: Ceilings) -> MachineShares:
    """`work` is what was asked for; the run may have served it padded."""
    costs = planned_costs(engine.model_config, engine.plan)
    served = [(line.num_prompt_tokens, line.num_output_tokens) for line in run.timelines]
    asked = [(one.num_prompt_tokens, one.num_output_tokens) for one in work]
    num_cached = sum(num_out * num_in + num_out * (num_out - 1) // 2 for num_in, num_out in served)
    num_bytes = costs.weight_bytes * len(run.num_running) + costs.kv_bytes_per_token * num_cached
    most = ceilings.flops_s * run.duration_s
    return MachineShares(
        bandwidth=num_bytes / (ceilings.bandwidth_bytes_s * run.duration_s),
        compute=step_flops(_all_of(served), costs) / most,
        useful_compute=step_flops(_all_of(asked), costs) / most,
    )


def _all_of(sizes: Sequence[tuple[int, int]]) -> StepWork:
    """All rows of requests of these prompts and answers, as if one step computed them one by one."""
    rows = [num_in + num_out - 1 for num_in, num_out in sizes]
    return StepWork(
        num_tokens=sum(rows),
        num_rows=sum(rows),
        num_sampled=sum(num_out for _, num_out in sizes),
        num_context_tokens=sum(count * (count + 1) // 2 for count in rows),
    )
