"""Triton code that attention and the other layers share: how deep a kernel may load ahead, and what is done to the
heads of a projection before attention: norm, rotation and the write to the KV cache.

The kernels are tuned on a device with 227 KiB of shared memory; on others (163 KiB, 99 KiB) they take fewer stages
instead of failing at their first launch.

Rotation and write are bound by memory: each value is read once and written once. Arithmetic is float32; where
`TorchOps` rounds to the tensors' dtype in between, so do these. Nothing depends on the number of rows but the grid, so
that a step of another size compiles nothing anew and a row's result is the same to the bit in any step.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from headway.kv.kv_triton import codes, paired_codes, row_scales

_RESERVE_BYTES = 4096  # for reductions and layout changes within a kernel
_UNLIMITED = 1 << 30


def stages_that_fit(wanted: int, stage_bytes: int, device: torch.device, *, fixed_bytes: int = 0) -> int:
    """As many of `wanted` stages of `stage_bytes` as fit beside `fixed_bytes`; at least one."""
    room = _shared_memory_bytes(device) - fixed_bytes - _RESERVE_BYTES
    return max(1, min(wanted, room // stage_bytes))


@functools.cache
def _shared_memory_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _UNLIMITED
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _UNLIMITED))


@triton.jit
def rounded(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """float32 x with what the elements behind the pointer `like` cannot hold rounded off."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def load_halves(
    row: tl.tensor, head: tl.tensor, pair: tl.tensor, inside: tl.tensor, HEAD_DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The heads `head` of a row of qkv in float32, cut in the middle: two tiles [heads, pairs]."""
    at = row + head[:, None] * HEAD_DIM + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def normed_and_rotated(
    row: tl.tensor,
    head: tl.tensor,
    pair: tl.tensor,
    inside: tl.tensor,
    norm: tl.tensor | None,
    eps: tl.tensor,
    cos_sin_row: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The heads `head` of a row of qkv after norm (where there is one) and rotation."""
    HALF: tl.constexpr = HEAD_DIM // 2
    first, second = load_halves(row, head, pair, inside, HEAD_DIM)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(norm + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        first = rounded(rounded(first * scale, row) * first_weight[None, :], row)
        second = rounded(rounded(second * scale, row) * second_weight[None, :], row)
    cos = tl.load(cos_sin_row + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_row + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    return rounded(first * cos - second * sin, row), rounded(second * cos + first * sin, row)


@triton.jit
def load_pairs(
    row: tl.tensor, head: tl.tensor, pair: tl.tensor, inside: tl.tensor, HEAD_DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The heads `head` of a row of qkv in float32: their even and their odd dimensions, two tiles [heads, pairs]."""
    at = row + head[:, None] * HEAD_DIM + 2 * pair[None, :]
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    return even, odd


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rope_write_kv_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    cos_sin: tl.tensor,
    q_norm: tl.tensor | None,
    k_norm: tl.tensor | None,
    eps: tl.tensor,
    q_out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    scales: tl.tensor | None,
    k_block_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    k_token_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_dim_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    K_LARGEST: tl.constexpr,
    V_LARGEST: tl.constexpr,
) -> None:
    """A program is one token and GROUP of its q heads, or GROUP of its k heads and the v heads beside them.

    The second grid axis counts the groups of q heads, then those of k heads. PAIRS is the power of two from D/2 on.
    A token whose slot is negative is padding: it gets a q like any other, and nothing is written to the cache.
    With `scales` the cache holds codes up to K_LARGEST and V_LARGEST, values of uint8 two to a byte.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (NUM_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    cos_sin_row = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM
    pair = tl.arange(0, PAIRS)
    if group < Q_GROUPS:
        head = group * GROUP + tl.arange(0, GROUP)
        inside = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
        first, second = normed_and_rotated(row, head, pair, inside, q_norm, eps, cos_sin_row, HEAD_DIM)
        to = q_out + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + pair[None, :]
        tl.store(to, first.to(q_out.dtype.element_ty), mask=inside)
        tl.store(to + HALF, second.to(q_out.dtype.element_ty), mask=inside)
    else:
        head = (group - Q_GROUPS) * GROUP + tl.arange(0, GROUP)
        inside = (head < NUM_KV_HEADS)[:, None] & (pair < HALF)[None, :]
        k_head, v_head = head + NUM_HEADS, head + (NUM_HEADS + NUM_KV_HEADS)
        k_first, k_second = normed_and_rotated(row, k_head, pair, inside, k_norm, eps, cos_sin_row, HEAD_DIM)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        num_written = tl.where(slot >= 0, NUM_KV_HEADS, 0)
        writes = (head < num_written)[:, None] & (pair < HALF)[None, :]
        k_to = k_cache + block * k_block_stride + offset * k_token_stride
        k_to = k_to + head[:, None] * k_head_stride + pair[None, :] * k_dim_stride
        v_to = v_cache + block * v_block_stride + offset * v_token_stride
        v_to = v_to + head[:, None] * v_head_stride + pair[None, :] * v_dim_stride
        if scales is None:
            v_first, v_second = load_halves(row, v_head, pair, inside, HEAD_DIM)
            k_first, k_second = k_first.to(k_cache.dtype.element_ty), k_second.to(k_cache.dtype.element_ty)
            v_first, v_second = v_first.to(v_cache.dtype.element_ty), v_second.to(v_cache.dtype.element_ty)
        else:
            k_scale = row_scales(k_first, k_second, K_LARGEST)
            k_first = codes(k_first, k_scale, k_cache.dtype.element_ty, K_LARGEST)
            k_second = codes(k_second, k_scale, k_cache.dtype.element_ty, K_LARGEST)
            if v_cache.dtype.element_ty == tl.uint8:
                even, odd = load_pairs(row, v_head, pair, inside, HEAD_DIM)
                v_scale = row_scales(even, odd, V_LARGEST)
                v_first = paired_codes(even, odd, v_scale, V_LARGEST)
            else:
                v_first, v_second = load_halves(row, v_head, pair, inside, HEAD_DIM)
                v_scale = row_scales(v_first, v_second, V_LARGEST)
                v_first = codes(v_first, v_scale, v_cache.dtype.element_ty, V_LARGEST)
                v_second = codes(v_second, v_scale, v_cache.dtype.element_ty, V_LARGEST)
            scale_to = scales + ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset) * 2
            tl.store(scale_to, k_scale, mask=head < num_written)
            tl.store(scale_to + 1, v_scale, mask=head < num_written)
        tl.store(k_to, k_first, mask=writes)
        tl.store(k_to + HALF * k_dim_stride, k_second, mask=writes)
        tl.store(v_to, v_first, mask=writes)
        if v_cache.dtype.element_ty != tl.uint8:
            tl.store(v_to + HALF * v_dim_stride, v_second, mask=writes)
