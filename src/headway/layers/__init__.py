"""What decoder layers are made of: the `Ops` vocabulary, its implementations, rotary tables."""

from __future__ import annotations

import torch

from headway.errors import ConfigError
from headway.layers.ops import Linear, Ops

__all__ = ["OPS_NAMES", "Linear", "Ops", "create_ops"]

OPS_NAMES = ("auto", "native", "torch")


def create_ops(name: str, *, device: torch.device | str, dtype: torch.dtype) -> Ops:
    """Build the named implementation; `auto` is native for float32 on the CPU where that can be built, else torch."""
    if name not in OPS_NAMES:
        raise ConfigError(f"unknown ops {name!r}; valid names are {', '.join(OPS_NAMES)}")
    native_fits = torch.device(device).type == "cpu" and dtype == torch.float32
    if name == "native" and not native_fits:
        raise ConfigError(f"native ops run in float32 on the CPU, not in {dtype} on {device}; use ops 'torch'")
    if name == "native" or (name == "auto" and native_fits and _native_available()):
        from headway.layers.native_ops import NativeOps

        return NativeOps()
    from headway.layers.torch_ops import TorchOps

    return TorchOps()


def _native_available() -> bool:
    from headway import native

    return native.is_available()
