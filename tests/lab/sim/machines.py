"""Calibrations for tests, made up."""

from __future__ import annotations

from typing import Any

from headway_lab.sim import Calibration, CostModel, HostTime
from headway_lab.sim.cost_model import FitError

SCHEDULER = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "target_itl_ms": 0.0, "scheduling_policy": "fcfs"}


def calibration(cost: CostModel | None = None, **changes: Any) -> Calibration:
    """A small machine: 10 ms for a step and 1 ms for each token."""
    fields: dict[str, Any] = {
        "cost": cost or small_cost(),
        "host": HostTime(0.0005, 0.00001, 0.0002, 0.00002),
        "overlap": False,
        "num_blocks": 200,
        "block_size": 4,
        "max_model_len": 256,
        "vocab_size": 1000,
        "scheduler": SCHEDULER,
        "cache": {"enable_prefix_caching": False},
        "bytes_per_block": 1024,
        "model": "small",
        "device": "cpu",
        "device_name": "a machine",
        "dtype": "float32",
        "kv_dtype": "float16",
        "versions": {"headway": "0"},
    }
    return Calibration(**{**fields, **changes})


def small_cost() -> CostModel:
    plain = CostModel.of_terms(decode_constant=0.01, rows_over_0=0.001, chunk_constant=0.01, tokens_over_0=0.001)
    errors = (FitError("decode", 10, 0.02, 0.05, 0.001), FitError("mixed", 5, 0.04, 0.09, -0.002))
    return CostModel(plain.coefficients, errors, 75, (0.9, 1.0, 1.1))
