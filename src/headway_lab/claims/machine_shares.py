"""How much of what a machine can do at most a run took, and how much of that for tokens that were asked for.

Flops and bytes are those of `headway.worker.step_costs`, summed up over requests: a request with a prompt of p tokens
and an answer of n computes p + n − 1 rows, each of which is compared with all before it. Its first step reads its p
keys and values, and each later one those of all tokens so far. Weights are read once for each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.models.costs import ModelCosts
from headway.worker.ceilings import Ceilings
from headway_lab.claims.testbed import Run
from headway_lab.workload.bench_requests import Work


@dataclass(frozen=True)
class MachineShares:
    """Shares of the machine's ceilings, over the whole run."""

    bandwidth: float
    compute: float
    useful_compute: float
    """Of arithmetic, without that of padding."""


def machine_shares(run: Run, work: Work, costs: ModelCosts, ceilings: Ceilings) -> MachineShares:
    """`work` is what was asked for; the run may have served it padded."""
    served = [(line.num_prompt_tokens, line.num_output_tokens) for line in run.timelines]
    asked = [(one.num_prompt_tokens, one.num_output_tokens) for one in work]
    cached = sum(num_out * num_in + num_out * (num_out - 1) // 2 for num_in, num_out in served)
    num_bytes = costs.weight_bytes * len(run.num_running) + costs.kv_bytes_per_token * cached
    most = ceilings.flops_s * run.duration_s
    return MachineShares(
        bandwidth=num_bytes / (ceilings.bandwidth_bytes_s * run.duration_s),
        compute=_flops(served, costs) / most,
        useful_compute=_flops(asked, costs) / most,
    )


def _flops(sizes: Iterable[tuple[int, int]], costs: ModelCosts) -> float:
    total = 0.0
    for num_in, num_out in sizes:
        num_rows = num_in + num_out - 1
        total += costs.linear_flops_per_token * num_rows
        total += costs.attention_flops_per_pair * num_rows * (num_rows + 1) / 2
        total += costs.output_flops * num_out
    return total
