"""How the weights of linear layers are stored and multiplied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.layers.ops import Linear

__all__ = ["QUANTIZATION_NAMES", "LinearFactory", "linear_factory"]

QUANTIZATION_NAMES = ("none", "int8")

LinearFactory = Callable[[Tensor, Tensor | None], Linear]


def linear_factory(quantization: str, *, device: torch.device | str, dtype: torch.dtype, native: bool) -> LinearFactory:
    """The constructor `(weight, bias) -> Linear` for a choice of storage.

    `none` keeps the weights in `dtype` (packed for the CPU kernels when `native`); `int8` quantises them for the CPU
    kernels, which take and return float32.
    """
    on_cpu_float32 = torch.device(device).type == "cpu" and dtype == torch.float32
    if quantization == "int8":
        if not on_cpu_float32:
            raise ConfigError(
                f"int8 weights run on the CPU with float32 activations, not on {device} in {dtype}; "
                "use quantization 'none'"
            )
        from headway.quantization.packed_linear import Int8Linear

        return Int8Linear
    if quantization != "none":
        raise ConfigError(f"unknown quantization {quantization!r}; valid names are {', '.join(QUANTIZATION_NAMES)}")
    if native:
        from headway.quantization.packed_linear import Float32Linear

        return Float32Linear
    from headway.quantization.torch_linear import TorchLinear

    return TorchLinear
