"""`Ops` on the CPU kernels: float32 activations, any KV cache but bfloat16, every row independent of the others."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from headway.attention.base import HeadNorms, Heads
from headway.attention.cpu import NativeKVCache
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import Delta
from headway.layers.ops import Ops
from headway.native.lib import MAX_HEAD_DIM, NativeLibrary, check, load


class NativeOps(Ops):
    """The CPU implementation. Calls keep the interpreter lock: each runs for microseconds."""

    name = "native"

    def __init__(self, library: NativeLibrary | None = None) -> None:
        functions = (library or load()).held
        self._rms_norm = functions.hw_rms_norm
        self._add_rms_norm = functions.hw_add_rms_norm
        self._silu_mul = functions.hw_silu_mul
        self._rope_write_kv = functions.hw_rope_write_kv
        self._layers: dict[int, _Layer] = {}

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return torch.index_select(table, 0, token_ids)

    def norm(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> Tensor:
        rows, width = check(residual, torch.float32, "residual").shape
        _check_norm(weight, width)
        out = torch.empty_like(residual)
        if not isinstance(delta, Tensor):
            self._rms_norm(residual.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())
            return out
        if check(delta, torch.float32, "delta").shape != residual.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}, residual {tuple(residual.shape)}")
        self._add_rms_norm(delta.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = check(gate_up, torch.float32, "gate_up").shape
        out = torch.empty(rows, width // 2)
        self._silu_mul(gate_up.data_ptr(), rows, width // 2, out.data_ptr())
        return out

    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        kv: LayerKVCache,
    ) -> Tensor:
        layer = self._layers.get(id(kv))
        if layer is None or not layer.is_of(kv, heads, norms):
            layer = self._layers[id(kv)] = _Layer(kv, heads, norms)
        tokens, width = check(qkv, torch.float32, "qkv").shape
        if width != layer.width:
            raise ValueError(f"qkv has {width} columns, the layer's heads take {layer.width}")
        if check(positions, torch.int64, "positions").numel() != tokens:
            raise ValueError(f"{positions.numel()} positions for {tokens} tokens")
        if check(slot_mapping, torch.int64, "slot_mapping").numel() != tokens:
            raise ValueError(f"{slot_mapping.numel()} slots for {tokens} tokens")
        q = torch.empty(tokens, heads.num_heads, heads.head_dim)
        self._rope_write_kv(
            qkv.data_ptr(),
            positions.data_ptr(),
            *layer.norms_and_cache,
            slot_mapping.data_ptr(),
            tokens,
            *layer.shape,
            q.data_ptr(),
        )
        return q


class _Layer:
    """What stays the same in the calls of a layer, checked once: a decode step is many short calls."""

    def __init__(self, kv: LayerKVCache, heads: Heads, norms: HeadNorms | None) -> None:
        self.width = heads.qkv_size
        self.shape = heads.num_heads, heads.num_kv_heads, heads.head_dim
        if heads.head_dim % 2 or heads.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"heads of {heads.head_dim} elements: an even number of at most {MAX_HEAD_DIM} is possible"
            )
        check(heads.cos_sin, torch.float32, "cos_sin")
        if norms is not None:
            _check_norm(norms.q, heads.head_dim)
            _check_norm(norms.k, heads.head_dim)
        self._cache = NativeKVCache.of(kv)
        self.norms_and_cache = (
            heads.cos_sin.data_ptr(),
            None if norms is None else norms.q.data_ptr(),
            None if norms is None else norms.k.data_ptr(),
            heads.eps,
            ctypes.addressof(self._cache),
            kv.block_size,
        )
        self._kv, self._heads = weakref.ref(kv), weakref.ref(heads)
        self._norms = None if norms is None else weakref.ref(norms)

    def is_of(self, kv: LayerKVCache, heads: Heads, norms: HeadNorms | None) -> bool:
        own_norms = None if self._norms is None else self._norms()
        return self._kv() is kv and self._heads() is heads and own_norms is norms


def _check_norm(weight: Tensor, width: int) -> None:
    if check(weight, torch.float32, "norm weight").numel() != width:
        raise ValueError(f"norm weight has {weight.numel()} values for rows of {width}")
