"""A calibrated machine, simulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.lab.bench.rounds import Progress
from headway.lab.claims.place import Run
from headway.lab.claims.where import Where
from headway.lab.sim import Calibration, CostModel, simulate
from headway.lab.sim.cost_model import TERMS
from headway.lab.sim.setup import check_work, set_up
from headway.lab.workload.requests import Work

SHIPPED = "h200-llama31-8b"
_KV_BYTES = {"fp8": 130 / 256, "int8": 130 / 256, "int4": 98 / 256}
"""Of a token and head of 128 numbers, with scales, against 16 bits each."""


class SimulatedPlace:
    """The real scheduler on a virtual clock."""

    where: Where = "simulator"

    def __init__(self, calibration: Calibration) -> None:
        self._first = self._calibration = calibration

    @classmethod
    def open(cls, path: str | Path | None = None) -> SimulatedPlace:
        """From a calibration's file, or by the name of one that is shipped."""
        return cls(Calibration.find(SHIPPED if path is None else path))

    @property
    def description(self) -> str:
        calibration = self._first
        machine = f"{calibration.model or 'a model'} on {calibration.device_name or calibration.device}"
        return f"simulator: {machine}; {self.trust}"

    @property
    def trust(self) -> str:
        cost = self._first.cost
        if not cost.errors:
            return "error of steps not known: costs from single measurements, not fitted"
        return f"mean error of steps {100 * cost.mean_error:.1f}%"

    @property
    def is_cpu(self) -> bool:
        """Time is virtual here."""
        return False

    @property
    def vocab_size(self) -> int:
        return self._calibration.vocab_size

    @property
    def max_num_seqs(self) -> int:
        return self._calibration.scheduler_settings().max_num_seqs

    @property
    def bytes_per_token(self) -> float:
        return self._calibration.bytes_per_block / self._calibration.block_size

    @property
    def block_size(self) -> int:
        return self._calibration.block_size

    @property
    def kv_tokens(self) -> int:
        return self._calibration.num_blocks * self._calibration.block_size

    def run(
        self,
        work: Work,
        *,
        kv_tokens: int | None = None,
        max_model_len: int | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Run:
        calibration = self._calibration
        num_blocks = min(self.kv_tokens, kv_tokens or self.kv_tokens) // options.get("block_size", self.block_size)
        setup = set_up(calibration, {"enable_prefix_caching": False, **options, "num_kv_blocks": max(1, num_blocks)})
        longest = min(max_model_len or calibration.max_model_len, calibration.max_model_len)
        machine = dataclasses.replace(setup.machine, max_model_len=longest)
        check_work(work, machine)
        done = simulate(work, machine, setup.scheduler, setup.cache, progress=progress)
        return Run(done.timelines, done.duration_s, done.waste, done.num_running)

    def use_kv_dtype(self, kv_dtype: str | None) -> None:
        """What is known without measuring: a token takes fewer bytes, so more fit, and reading one takes less time."""
        if kv_dtype is None:
            self._calibration = self._first
            return
        if kv_dtype not in _KV_BYTES:
            raise ConfigError(f"KV format '{kv_dtype}' cannot be simulated; known are {', '.join(_KV_BYTES)}.")
        share, first = _KV_BYTES[kv_dtype], self._first
        self._calibration = dataclasses.replace(
            first,
            cost=_with_context_share(first.cost, share),
            num_blocks=int(first.num_blocks / share),
            bytes_per_block=round(first.bytes_per_block * share),
        )


def _with_context_share(cost: CostModel, share: float) -> CostModel:
    place = TERMS.index("context")
    coefficients = [c * share if number == place else c for number, c in enumerate(cost.coefficients)]
    return dataclasses.replace(cost, coefficients=tuple(coefficients))
