"""A calibrated machine with its KV cache in a smaller number format, as far as that is known without measuring it.

A token takes fewer bytes, so more tokens fit into the same memory, and reading one takes less time in proportion. What
decoding the codes adds to a step is not known, and neither is how answers change (docs/kv_quantisation.md).
"""

from __future__ import annotations

import dataclasses

from headway.errors import ConfigError
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.cost_model import TERMS, CostModel

_KV_BYTES = {"fp8": 130 / 256, "int8": 130 / 256, "int4": 98 / 256}
"""Bytes of a token and head of 128 numbers, with scales, divided by those in 16 bits."""
_SIXTEEN_BITS = ("float16", "bfloat16")

KV_FORMATS = tuple(_KV_BYTES)


def can_change_kv(calibration: Calibration) -> bool:
    """Whether smaller formats can be derived: the KV cache was measured in 16 bits on a GPU, where reading it takes as
    long as its bytes."""
    return calibration.kv_dtype in _SIXTEEN_BITS and calibration.device_kind == "cuda"


def with_kv_format(calibration: Calibration, kv_format: str) -> Calibration:
    """The machine with this format, from one that was measured with 16 bits."""
    if kv_format not in _KV_BYTES:
        raise ConfigError(f"KV format '{kv_format}' cannot be simulated; known are {', '.join(_KV_BYTES)}.")
    share = _KV_BYTES[kv_format]
    return dataclasses.replace(
        calibration,
        cost=_with_context_share(calibration.cost, share),
        num_blocks=int(calibration.num_blocks / share),
        bytes_per_block=round(calibration.bytes_per_block * share),
        kv_dtype=kv_format,
        cache={**calibration.cache, "kv_cache_dtype": kv_format},
    )


def _with_context_share(cost: CostModel, share: float) -> CostModel:
    place = TERMS.index("context")
    coefficients = [c * share if number == place else c for number, c in enumerate(cost.coefficients)]
    return dataclasses.replace(cost, coefficients=tuple(coefficients))
