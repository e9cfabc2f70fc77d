"""What decoder layers are made of: kinds of `Linear`, kinds of `Mlp`, the `Ops` vocabulary and its implementations."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.layers.linear import QUANTIZATION_NAMES, Linear, TorchLinear
from headway.layers.ops import Ops

__all__ = ["OPS_NAMES", "LinearFactory", "Ops", "create_ops", "linear_factory"]

OPS_NAMES = ("auto", "native", "torch", "triton")

_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def create_ops(name: str, *, device: torch.device | str, dtype: torch.dtype) -> Ops:
    """Build the named implementation.

    `auto` is native for float32 on the CPU where that can be built, triton on CUDA where the package is there, and
    torch otherwise.
    """
    device = torch.device(device)
    if name not in OPS_NAMES:
        raise ConfigError(f"unknown ops {name!r}; valid names are {', '.join(OPS_NAMES)}")
    if name == "auto":
        name = _best_ops(device, dtype)
    if name == "native":
        return _native_ops(device, dtype)
    if name == "triton":
        return _triton_ops(device, dtype)
    from headway.layers.torch_ops import TorchOps

    return TorchOps()


def _best_ops(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cpu" and dtype == torch.float32 and _native_available():
        return "native"
    if device.type == "cuda" and dtype in _TRITON_DTYPES and _triton_available():
        return "triton"
    return "torch"


def _native_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type != "cpu" or dtype != torch.float32:
        raise ConfigError(f"native ops run in float32 on the CPU, not in {dtype} on {device}; use ops 'torch'")
    from headway.layers.native_ops import NativeOps

    return NativeOps()


def _triton_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if dtype not in _TRITON_DTYPES or (device.type != "cuda" and not interpreted):
        raise ConfigError(
            f"triton ops run in float32, float16 or bfloat16 on CUDA, not in {dtype} on {device}; use ops 'torch'"
        )
    if not _triton_available():
        raise ConfigError("triton ops need the package triton, which is not installed; use ops 'torch'")
    from headway.layers.triton_ops import TritonOps

    return TritonOps()


def _native_available() -> bool:
    from headway import native

    return native.is_available()


def _triton_available() -> bool:
    return importlib.util.find_spec("triton") is not None


LinearFactory = Callable[[Tensor, Tensor | None], Linear]


def linear_factory(quantization: str, *, kernels: str, device: torch.device | str, dtype: torch.dtype) -> LinearFactory:
    """The constructor `(weight, bias) -> Linear` for the weights of a model whose `Ops` are `kernels`.

    `none` keeps the weights in `dtype`; `int8` quantises them for the CPU kernels, which take and return float32.
    """
    if quantization not in QUANTIZATION_NAMES:
        raise ConfigError(f"unknown quantization {quantization!r}; valid names are {', '.join(QUANTIZATION_NAMES)}")
    if quantization == "int8":
        if torch.device(device).type != "cpu" or dtype != torch.float32:
            raise ConfigError(
                f"int8 weights run on the CPU with float32 activations, not on {device} in {dtype}; "
                "use quantization 'none'"
            )
        from headway.layers.packed_linear import Int8Linear

        return Int8Linear
    if kernels == "native":
        from headway.layers.packed_linear import Float32Linear

        return Float32Linear
    if kernels == "triton":
        from headway.layers.triton_ops import TritonLinear

        return TritonLinear
    return TorchLinear
