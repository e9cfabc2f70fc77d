"""`Ops` and `Linear` on CUDA: row-wise work in our own Triton kernels, matmuls by cuBLAS or, for few rows, fused ones.

Tensors are float32, float16 or bfloat16. Nothing waits for the device, and a new number of tokens compiles nothing. A
slot below zero marks a padding token, whose key and value are not written; its position must still be one of the rotary
table. Token ids, positions and slots may be int32 or int64.

The kernels are bound by memory: each value is read once and written once. Arithmetic is float32; where `TorchOps`
rounds to the tensors' dtype in between, so do these. Rows are contiguous. Widths need not be powers of two: BLOCK is
the next one, and columns beyond the width are masked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headway.attention.base import HeadNorms, Heads
from headway.attention.paged_kernels import rope_write_kv_kernel, rounded
from headway.attention.triton_device import await_previous, begin, dependent_launch
from headway.kv.layer_cache import LayerKVCache
from headway.layers import skinny_gemm
from headway.layers.linear import AfterNorm, Delta, Gate, IntoResidual, Norm, ScaledRows, TorchLinear
from headway.layers.ops import Ops

_SILU_BLOCK = 1024
# A rope program's tile of pairs: one warp with 16 bytes of bfloat16 per thread and half.
_ROPE_TILE = 256


@triton.jit
def rms_norm_kernel(
    residual: tl.tensor,
    delta: tl.tensor | None,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """A program is a row. With a delta: residual += delta first, in place."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    x = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        x = rounded(x + tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32), residual)
        tl.store(residual + row + column, x.to(residual.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    normed = rounded(x * scale, out) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
) -> None:
    """A program is BLOCK columns of one row of `out` [rows, WIDTH]; gate_up is [rows, 2 * WIDTH]."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    gate = tl.load(gate_up + 2 * row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    activated = rounded(gate * tl.sigmoid(gate), out) * up
    tl.store(out + row + column, activated.to(out.dtype.element_ty), mask=inside)


class TritonOps(Ops):
    """The CUDA implementation."""

    name = "triton"

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def norm(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> Tensor:
        rows, width = _contiguous(residual, "residual").shape
        if isinstance(delta, ScaledRows):
            delta = None  # the residual already includes it
        if delta is not None and _contiguous(delta, "delta").shape != residual.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}, residual {tuple(residual.shape)}")
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows,)](
            residual, delta, weight, out, eps,
            WIDTH=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **dependent_launch(residual),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = _contiguous(gate_up, "gate_up").shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
        silu_mul_kernel[(rows, triton.cdiv(width // 2, _SILU_BLOCK))](
            gate_up, out, WIDTH=width // 2, BLOCK=_SILU_BLOCK, **dependent_launch(gate_up)
        )
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
            qkv, positions, slot_mapping, heads.cos_sin,
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            heads.eps, q, kv.k, kv.v, kv.scales, *kv.k.stride(), *kv.v.stride(),
            NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim,
            BLOCK_SIZE=kv.block_size, GROUP=group, PAIRS=pairs,
            K_LARGEST=kv.format.keys.largest, V_LARGEST=kv.format.values.largest, num_warps=1,
            **dependent_launch(qkv),
        )  # fmt: skip
        return q


@triton.jit
def meet_kernel(
    flags: tl.tensor, addresses: tl.tensor, turn: tl.tensor, rank: tl.tensor, NUM_RANKS: tl.constexpr
) -> None:
    """One program, which ends when those of all ranks have begun."""
    number = tl.load(turn) + 1
    tl.store(turn, number)
    for other in tl.static_range(NUM_RANKS):
        others = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(others + rank, number, sem="release", scope="sys")
    for other in tl.static_range(NUM_RANKS):
        while tl.atomic_add(flags + other, 0, sem="acquire", scope="sys") < number:
            pass


def meet(flags: Tensor, addresses: Tensor, turn: Tensor, *, rank: int) -> None:
    """Wait on the device until all ranks have arrived as often as this one. `flags` int64 [ranks] counts each rank's
    arrivals and is written by the others; `addresses` are those of all ranks' flags; `turn` int64 [1] counts this
    rank's arrivals."""
    meet_kernel[(1,)](flags, addresses, turn, rank, NUM_RANKS=len(flags), num_warps=1)


def _contiguous(tensor: Tensor, name: str) -> Tensor:
    """Check that a tensor is contiguous, as the kernels require. Raises if it is not."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tuple(tensor.stride())}")
    return tensor


class TritonLinear(TorchLinear):
    """With `skinny`, few rows of half precision use the fused matmuls of `skinny_gemm`; all others use cuBLAS.

    A product for the residual is accumulated in place inside the matmul, so that no sum is left for the next norm.
    """

    adds_in_place = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, skinny: bool = True) -> None:
        super().__init__(weight, bias)
        self._skinny = skinny and weight.dtype.itemsize == 2
        self._splits = self._skinny and self.out_features <= skinny_gemm.MAX_SPLIT_OUTPUTS

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._is_one_row(x):
            return skinny_gemm.one_row(x, self.weight, self.bias, out=out)
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def into_residual(self, next_norm: Tensor) -> IntoResidual:
        def add(residual: Tensor, x: Tensor) -> Delta:
            if self._is_one_row(x):
                skinny_gemm.one_row(x, self.weight, self.bias, residual=residual)
                return None
            if self._splits and len(x) <= skinny_gemm.MAX_SPLIT_ROWS:
                return skinny_gemm.split_add(x, self.weight, self.bias, residual, next_norm)
            if self.bias is not None:
                residual.add_(self.bias)
            residual.addmm_(x, self.weight.t())
            return None

        return add

    def after_norm(self, norm: Norm, gate: Gate | None = None) -> AfterNorm:
        steps = super().after_norm(norm, gate)
        if not self._skinny:
            return steps
        weight, bias, is_gated = self.weight, self.bias, gate is not None

        def run(residual: Tensor, delta: Delta) -> Tensor:
            if delta is None and len(residual) == 1:
                return skinny_gemm.one_row(residual, weight, bias, norm=norm.weight, eps=norm.eps, swiglu=is_gated)
            if isinstance(delta, ScaledRows):
                if is_gated:
                    return skinny_gemm.swiglu(delta.values, weight, bias, squares=delta.squares, eps=norm.eps)
                return skinny_gemm.scaled_linear(delta, weight, bias, norm.eps)
            if is_gated and len(residual) <= skinny_gemm.MAX_SPLIT_ROWS:
                return skinny_gemm.swiglu(norm(residual, delta), weight, bias)
            return steps(residual, delta)

        return run

    def _is_one_row(self, x: Tensor) -> bool:
        return self._skinny and len(x) == 1
