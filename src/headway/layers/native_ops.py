"""`Ops` on the CPU kernels: float32 activations, float32 or float16 KV cache, every row independent of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.attention.base import LayerKVCache
from headway.native.lib import MAX_HEAD_DIM, NativeLibrary, check, load


class NativeOps:
    """The CPU implementation. Calls keep the interpreter lock: each runs for microseconds."""

    name = "native"

    def __init__(self, library: NativeLibrary | None = None) -> None:
        functions = (library or load()).held
        self._rms_norm = functions.hw_rms_norm
        self._add_rms_norm = functions.hw_add_rms_norm
        self._silu_mul = functions.hw_silu_mul
        self._rope_write_kv = functions.hw_rope_write_kv

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return torch.index_select(table, 0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = check(x, torch.float32, "x").shape
        _check_norm(weight, width)
        out = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = check(x, torch.float32, "x").shape
        if check(residual, torch.float32, "residual").shape != x.shape:
            raise ValueError(f"residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}")
        _check_norm(weight, width)
        out = torch.empty_like(x)
        self._add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())
        return out

    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: LayerKVCache,
        slot_mapping: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> Tensor:
        k_cache, v_cache = kv.k, kv.v
        tokens, width = check(qkv, torch.float32, "qkv").shape
        if width != (num_heads + 2 * num_kv_heads) * head_dim or head_dim % 2 or head_dim > MAX_HEAD_DIM:
            raise ValueError(f"qkv has {width} columns for {num_heads} + 2 * {num_kv_heads} heads of {head_dim}")
        half = k_cache.dtype is torch.float16
        cache_dtype = torch.float16 if half else torch.float32
        check(k_cache, cache_dtype, "the key cache")
        check(v_cache, cache_dtype, "the value cache")
        check(cos_sin, torch.float32, "cos_sin")
        if check(positions, torch.int64, "positions").numel() != tokens:
            raise ValueError(f"{positions.numel()} positions for {tokens} tokens")
        if check(slot_mapping, torch.int64, "slot_mapping").numel() != tokens:
            raise ValueError(f"{slot_mapping.numel()} slots for {tokens} tokens")
        for norm in (q_norm, k_norm):
            if norm is not None:
                _check_norm(norm, head_dim)
        q = torch.empty(tokens, num_heads, head_dim)
        self._rope_write_kv(
            qkv.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            half,
            k_cache.shape[3],
            slot_mapping.data_ptr(),
            tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            q.data_ptr(),
        )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = check(gate_up, torch.float32, "gate_up").shape
        out = torch.empty(rows, width // 2)
        self._silu_mul(gate_up.data_ptr(), rows, width // 2, out.data_ptr())
        return out


def _check_norm(weight: Tensor, width: int) -> None:
    if check(weight, torch.float32, "norm weight").numel() != width:
        raise ValueError(f"norm weight has {weight.numel()} values for rows of {width}")
