"""Attention over the paged KV cache: one small interface, several backends."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from headway.attention.base import AttentionBackend, AttentionBatch, DividesWork, HeadNorms, Heads
from headway.errors import ConfigError
from headway.kv.kv_format import FORMATS, KVFormat
from headway.kv.layer_cache import LayerKVCache

__all__ = [
    "BACKEND_NAMES",
    "FORMATS",
    "AttentionBackend",
    "AttentionBatch",
    "DividesWork",
    "HeadNorms",
    "Heads",
    "KVFormat",
    "create_backend",
]

BACKEND_NAMES = ("auto", "triton", "cpu", "torch_padded", "torch_reference")


def create_backend(name: str, kv_caches: Sequence[LayerKVCache], num_heads: int) -> AttentionBackend:
    """Build the named backend over `kv_caches` (one per layer) for a model with `num_heads` query heads.

    `auto` takes the Triton kernels on CUDA, the native CPU kernels for a float32 or quantised cache on the CPU where
    they can be built, and torch otherwise.
    """
    if name == "auto":
        name = _best_backend(kv_caches, num_heads)
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


def _best_backend(kv_caches: Sequence[LayerKVCache], num_heads: int) -> str:
    if kv_caches[0].v.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton"
    return "cpu" if _native_fits(kv_caches, num_heads) else "torch_padded"


def _native_fits(kv_caches: Sequence[LayerKVCache], num_heads: int) -> bool:
    cache = kv_caches[0]
    if cache.k.device.type != "cpu" or not (cache.format.is_scaled or cache.k.dtype == torch.float32):
        return False
    from headway import native
    from headway.attention.cpu import CpuAttention

    return native.is_available() and CpuAttention.is_supported(kv_caches, num_heads)
