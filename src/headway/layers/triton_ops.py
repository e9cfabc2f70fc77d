"""`Ops` on CUDA: row-wise work in our own Triton kernels, matmuls by cuBLAS or, for few rows, by fused Triton ones.

float32, float16 and bfloat16. Nothing waits for the device, and nothing is compiled anew because a step has another
number of tokens. A slot below zero marks a padding token, whose key and value are written nowhere; its position must be
one of the rotary table all the same. Token ids, positions and slots may be int32 or int64.

`linear_add` accumulates into the residual inside the matmul, so between layers nothing is left to add. Only a Linear
that is not a plain weight multiplies by itself, and leaves its product as `delta`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from headway.kv.layer_cache import LayerKVCache
from headway.layers import skinny_gemm
from headway.layers.heads import HeadNorms, Heads
from headway.layers.ops import Delta, Linear, ScaledRows
from headway.layers.triton_kernels import rms_norm_kernel, rope_write_kv_kernel, silu_mul_kernel
from headway.quantization.torch_linear import TorchLinear

_SILU_BLOCK = 1024
# A rope program's tile of pairs: one warp with 16 bytes of bfloat16 per thread and half.
_ROPE_TILE = 256


class TritonOps:
    """The CUDA implementation. `skinny`: few rows go to `skinny_gemm`; otherwise cuBLAS takes all matmuls."""

    name = "triton"

    def __init__(self, *, skinny: bool = True) -> None:
        self._skinny = skinny

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def norm(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> Tensor:
        rows, width = _contiguous(residual, "residual").shape
        if isinstance(delta, ScaledRows):
            delta = None  # the residual is whole
        if delta is not None and _contiguous(delta, "delta").shape != residual.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}, residual {tuple(residual.shape)}")
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows,)](
            residual, delta, weight, out, eps, WIDTH=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
        )
        return out

    def norm_linear(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float, linear: Linear) -> Tensor:
        if delta is None and isinstance(linear, TorchLinear) and self._is_one_row(residual, linear):
            return skinny_gemm.one_row(residual, linear.weight, linear.bias, norm=weight, eps=eps)
        if isinstance(delta, ScaledRows) and isinstance(linear, TorchLinear):
            return skinny_gemm.scaled_linear(delta, linear.weight, linear.bias, eps)
        return self.linear(self.norm(residual, delta, weight, eps), linear)

    def norm_swiglu(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float, gate_up: Linear) -> Tensor:
        if not isinstance(gate_up, TorchLinear):
            return _silu_mul(gate_up(self.norm(residual, delta, weight, eps)))
        if delta is None and self._is_one_row(residual, gate_up):
            return skinny_gemm.one_row(residual, gate_up.weight, gate_up.bias, norm=weight, eps=eps, swiglu=True)
        if isinstance(delta, ScaledRows):
            return skinny_gemm.swiglu(delta.values, gate_up.weight, gate_up.bias, squares=delta.squares, eps=eps)
        x = self.norm(residual, delta, weight, eps)
        if self._skinny and skinny_gemm.supports_swiglu(x, gate_up.weight):
            return skinny_gemm.swiglu(x, gate_up.weight, gate_up.bias)
        return _silu_mul(gate_up(x))

    def linear(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        if not isinstance(linear, TorchLinear):
            return linear(x) if out is None else out.copy_(linear(x))
        if self._is_one_row(x, linear):
            return skinny_gemm.one_row(x, linear.weight, linear.bias, out=out)
        if out is None:
            return linear(x)
        if linear.bias is None:
            return torch.mm(x, linear.weight.t(), out=out)
        return torch.addmm(linear.bias, x, linear.weight.t(), out=out)

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor, next_norm: Tensor) -> Delta:
        if not isinstance(linear, TorchLinear):
            return linear(x)
        if self._is_one_row(x, linear):
            skinny_gemm.one_row(x, linear.weight, linear.bias, residual=residual)
        elif self._skinny and skinny_gemm.supports_split(x, linear.weight):
            return skinny_gemm.split_add(x, linear.weight, linear.bias, residual, next_norm)
        else:
            if linear.bias is not None:
                residual.add_(linear.bias)
            residual.addmm_(x, linear.weight.t())
        return None

    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        kv: LayerKVCache,
    ) -> Tensor:
        tokens, width = _contiguous(qkv, "qkv").shape
        if width != heads.qkv_size or kv.head_dim != heads.head_dim or kv.num_kv_heads != heads.num_kv_heads:
            raise ValueError(f"qkv {tuple(qkv.shape)} and keys {tuple(kv.k.shape)} do not fit {heads}")
        for name, per_token in (("positions", positions), ("slot_mapping", slot_mapping)):
            if _contiguous(per_token, name).shape != (tokens,):
                raise ValueError(f"{name} has shape {tuple(per_token.shape)} for {tokens} tokens")
        q = torch.empty(tokens, heads.num_heads, heads.head_dim, dtype=qkv.dtype, device=qkv.device)
        pairs = triton.next_power_of_2(heads.head_dim // 2)
        group = max(1, _ROPE_TILE // pairs)
        grid = (tokens, triton.cdiv(heads.num_heads, group) + triton.cdiv(heads.num_kv_heads, group))
        rope_write_kv_kernel[grid](
            qkv,
            positions,
            slot_mapping,
            heads.cos_sin,
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            heads.eps,
            q,
            kv.k,
            kv.v,
            kv.scales,
            *kv.k.stride(),
            *kv.v.stride(),
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_SIZE=kv.block_size,
            GROUP=group,
            PAIRS=pairs,
            K_LARGEST=kv.format.keys.largest,
            V_LARGEST=kv.format.values.largest,
            num_warps=1,
        )
        return q

    def _is_one_row(self, x: Tensor, linear: TorchLinear) -> bool:
        return self._skinny and skinny_gemm.supports_one_row(x, linear.weight)


def _silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = _contiguous(gate_up, "gate_up").shape
    out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(rows, triton.cdiv(width // 2, _SILU_BLOCK))](gate_up, out, WIDTH=width // 2, BLOCK=_SILU_BLOCK)
    return out


def _contiguous(tensor: Tensor, name: str) -> Tensor:
    """Refuse what the kernels would read wrongly."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tuple(tensor.stride())}")
    return tensor
