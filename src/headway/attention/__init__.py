"""Attention over the paged KV cache: one interface, several backends."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from headway.attention.base import AttentionBackend, AttentionBatch, DividesWork, HeadNorms, Heads
from headway.errors import ConfigError
from headway.kv.layer_cache import LayerKVCache

__all__ = [
    "BACKEND_NAMES",
    "AttentionBackend",
    "AttentionBatch",
    "DividesWork",
    "HeadNorms",
    "Heads",
    "create_backend",
]

BACKEND_NAMES = ("triton", "cpu", "torch_padded", "torch_reference")


def create_backend(name: str, kv_caches: Sequence[LayerKVCache], num_heads: int) -> AttentionBackend:
    """Build the named backend over `kv_caches` (one per layer) for a model with `num_heads` query heads.
    `headway.worker.formats` decides which one suits a device."""
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("attention backend 'triton' needs the package triton; use 'torch_padded'")
        from headway.attention.triton_paged import TritonPagedAttention

        return TritonPagedAttention(kv_caches, num_heads)
    if name == "cpu":
        from headway.attention.cpu import CpuAttention

        return CpuAttention(kv_caches, num_heads)
    if name == "torch_padded":
        from headway.attention.torch_attention import TorchPaddedAttention

        return TorchPaddedAttention(kv_caches, num_heads)
    if name == "torch_reference":
        from headway.attention.torch_attention import TorchReferenceAttention

        return TorchReferenceAttention(kv_caches, num_heads)
    raise ConfigError(f"unknown attention backend {name!r}; valid names are {', '.join(BACKEND_NAMES)}")
