"""`Ops` on the CPU kernels: float32 activations, any KV cache but bfloat16, every row independent of the others."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headway.attention.base import HeadNorms, Heads
from headway.attention.cpu import NativeHeads
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import Delta
from headway.layers.ops import Ops
from headway.native.lib import NativeLibrary, check, load


class NativeOps(Ops):
    """The CPU implementation. Calls keep the interpreter lock: each runs for microseconds."""

    name = "native"

    def __init__(self, library: NativeLibrary | None = None) -> None:
        functions = (library or load()).held
        self._rms_norm = functions.hw_rms_norm
        self._add_rms_norm = functions.hw_add_rms_norm
        self._silu_mul = functions.hw_silu_mul
        self._rope_write_kv = functions.hw_rope_write_kv
        self._layers: dict[int, NativeHeads] = {}

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
            layer = self._layers[id(kv)] = NativeHeads.of(kv, heads, norms)
        tokens = layer.check_step(qkv, positions, slot_mapping)
        q = torch.empty(tokens, heads.num_heads, heads.head_dim)
        self._rope_write_kv(
            ctypes.addressof(layer),
            qkv.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            tokens,
            q.data_ptr(),
        )
        return q


def _check_norm(weight: Tensor, width: int) -> None:
    if check(weight, torch.float32, "norm weight").numel() != width:
        raise ValueError(f"norm weight has {weight.numel()} values for rows of {width}")
