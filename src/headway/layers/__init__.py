"""The parts of decoder layers: kinds of `Linear`, kinds of `Mlp`, the `Ops` interface and its implementations."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.layers.linear import QUANTIZATION_NAMES, Linear, TorchLinear
from headway.layers.ops import Ops, TorchOps
from headway.layers.quantized_weight import QuantizedWeight, Weight, dequantised, quantise

__all__ = ["OPS_NAMES", "LinearFactory", "Ops", "create_ops"]

OPS_NAMES = ("native", "torch", "triton")

_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def create_ops(name: str, *, device: torch.device | str, dtype: torch.dtype) -> Ops:
    """Build the named implementation. `headway.worker.formats` decides which one suits a device and a dtype."""
    device = torch.device(device)
    if name not in OPS_NAMES:
        raise ConfigError(f"unknown ops {name!r}; valid names are {', '.join(OPS_NAMES)}")
    if name == "native":
        return _native_ops(device, dtype)
    if name == "triton":
        return _triton_ops(device, dtype)
    return TorchOps()


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
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("triton ops need the package triton, which is not installed; use ops 'torch'")
    from headway.layers.triton_ops import TritonOps

    return TritonOps()


class LinearFactory:
    """Chooses the kind of `Linear` for each weight, in a model whose `Ops` are `kernels`.

    `quantization` is the format that float weights are quantised to, or `none`. With `keeps_stored`, weights that the
    checkpoint stores as codes and scales stay so if there is a kernel for them; otherwise they become floats.
    """

    def __init__(
        self,
        quantization: str,
        *,
        keeps_stored: bool = False,
        kernels: str,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        if quantization not in QUANTIZATION_NAMES:
            raise ConfigError(f"unknown quantization {quantization!r}; valid names are {', '.join(QUANTIZATION_NAMES)}")
        self.keeps_stored = keeps_stored
        self._quantization = quantization
        self._device, self._dtype = torch.device(device), dtype
        make = {"native": self._native, "triton": self._triton, "torch": self._torch}
        if quantization != "none" and kernels == "torch":
            if self._device.type != "cpu" or dtype != torch.float32:
                raise ConfigError(
                    f"{quantization} weights run on the CPU with float32 activations, or on CUDA with the package "
                    f"triton, not on {device} in {dtype}; use quantization 'none'"
                )
            kernels = "native"
        self._make = make[kernels]

    @property
    def scales_whole_rows(self) -> bool:
        """Whether float weights get scales that depend on all inputs of a row, or on where groups begin."""
        return self._make == self._triton and self._quantization != "none"

    def quantised(self, weight: Tensor) -> QuantizedWeight:
        """Quantise a float weight."""
        return quantise(weight, self._quantization)

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Build a linear layer of the decoder."""
        return self._make(weight, bias)

    def head(self, weight: Weight) -> Linear:
        """Build the output layer, which loses most accuracy with few bits. On CUDA it is quantised only if the
        checkpoint stores it so; on a CPU it keeps at least 8 bits."""
        if self._make == self._triton and isinstance(weight, Tensor):
            return self._float(weight, None)
        if self._make == self._native and self._quantization == "int4" and isinstance(weight, Tensor):
            from headway.layers.native_ops import Int8Linear

            return Int8Linear(weight)
        return self._make(weight, None)

    def _native(self, weight: Weight, bias: Tensor | None) -> Linear:
        from headway.layers.native_ops import Float32Linear, Int4Linear, Int8Linear

        if self._quantization == "int4" and isinstance(weight, Tensor):
            weight = quantise(weight, "int4", groups=(32,))  # the kernels store a scale for each 32 inputs anyway
        if isinstance(weight, QuantizedWeight) and Int4Linear.takes(weight):
            return Int4Linear(weight, bias)
        if self._quantization == "none":
            return Float32Linear(dequantised(weight), bias)
        return Int8Linear(weight, bias)

    def _triton(self, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Tensor):
            if self._quantization == "none":
                return self._float(weight, bias)
            weight = quantise(weight, self._quantization)
        from headway.layers.quantized_linear import QuantizedLinear

        return QuantizedLinear(weight.to(self._device), bias, dtype=self._dtype)

    def _float(self, weight: Tensor, bias: Tensor | None) -> Linear:
        from headway.layers.triton_ops import TritonLinear

        return TritonLinear(weight.to(self._device, self._dtype), bias)

    def _torch(self, weight: Weight, bias: Tensor | None) -> Linear:
        return TorchLinear(dequantised(weight).to(self._device, self._dtype), bias)
