"""What simulated requests run on."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.lab.sim.cost_model import CostModel
from headway.lab.sim.host_time import HostTime


@dataclass(frozen=True)
class Machine:
    """One device with its KV memory, and the host beside it."""

    cost: CostModel
    num_blocks: int
    block_size: int
    max_model_len: int
    overlap: bool = False
    """Whether a step is planned while another runs."""
    host: HostTime = field(default_factory=HostTime)
    num_host_slots: int = 0
    restore_block_s: float = 0.0
