"""Kernels over the paged cache in Triton: rotate heads and write them, attend with one new token, attend with several.

Attention reads keys and values where they lie, block by block, through the request's block table, and keeps a running
maximum and sum so that no score is ever written to memory (online softmax). All query heads that share a key head are
computed together, so a key is read once for all of them.

Decoding one token is a matter of bandwidth: each program streams a part of one request's context for one key head.
The host divides the contexts (`triton_paged.py`) so that all programs have about as much to read; of those that share a
context, the last to finish combines the partial results, which saves a second kernel.

Several tokens (a prompt, or a chunk of one) are a matter of arithmetic: a program owns a tile of query rows, a row
being one token and one head, and walks over the keys up to the tile's last token. Only the tiles at the diagonal need
a mask, and only the last of a context has places that nothing was written to. Few new tokens behind a long known prefix
are few tiles: the keys that all rows of a tile see are cut into parts, too, each a program's. There a second kernel
adds up, by many programs: a part of a whole tile is large, and one program would take longer for them than all others
for the keys.

Rotation and write are bound by memory: each value is read once and written once. Arithmetic is float32; where
`TorchOps` rounds to the tensors' dtype in between, so do these. A row's result is the same to the bit in any step.

A quantised cache (one with `scales`, `kv/kv_triton.py`) is read as codes, which become numbers only in registers: a
key's scale multiplies its scores, a value's scale its weights. With a half-precision query both products are in
float16, which holds every code and is the cheapest to convert to; with a float32 query they are in float32. A weight is
multiplied by scale times largest code, that is by its value's largest magnitude, so that it stays well inside the range
of float16; the sum is divided by the largest code in the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from headway.attention.base import NUM_PART_COLUMNS
from headway.attention.triton_device import await_previous, begin
from headway.kv.kv_triton import add_row, add_values, key_numbers, load_scales, no_parts, row_codes, whole

PART_COLUMNS = tl.constexpr(NUM_PART_COLUMNS)


# ------------------------------------------------------------------------------------------------- rotation and writing


@triton.jit
def rounded(x, like):
    """float32 x with what the elements behind the pointer `like` cannot hold rounded off."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def load_halves(row, head, pair, inside, HEAD_DIM: tl.constexpr):
    """The heads `head` of a row of qkv in float32, cut in the middle: two tiles [heads, pairs]."""
    at = row + head[:, None] * HEAD_DIM + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def normed_and_rotated(row, head, pair, inside, norm, eps, cos_sin_row, HEAD_DIM: tl.constexpr):
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
def load_pairs(row, head, pair, inside, HEAD_DIM: tl.constexpr):
    """The heads `head` of a row of qkv in float32: their even and their odd dimensions, two tiles [heads, pairs]."""
    at = row + head[:, None] * HEAD_DIM + 2 * pair[None, :]
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    return even, odd


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rope_write_kv_kernel(
    qkv, positions, slot_mapping, cos_sin, q_norm, k_norm, eps, q_out, k_cache, v_cache, scales,
    k_block_stride, k_head_stride, k_dim_stride, k_token_stride,
    v_block_stride, v_head_stride, v_token_stride, v_dim_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, K_LARGEST: tl.constexpr, V_LARGEST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
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
    begin(DEPENDENT)
    await_previous(DEPENDENT)
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
            if v_cache.dtype.element_ty == tl.uint8:
                v_first, v_second = load_pairs(row, v_head, pair, inside, HEAD_DIM)
            else:
                v_first, v_second = load_halves(row, v_head, pair, inside, HEAD_DIM)
            k_scale, k_first, k_second = row_codes(k_first, k_second, k_cache.dtype.element_ty, K_LARGEST)
            v_scale, v_first, v_second = row_codes(v_first, v_second, v_cache.dtype.element_ty, V_LARGEST)
            scale_to = scales + ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset) * 2
            tl.store(scale_to, k_scale, mask=head < num_written)
            tl.store(scale_to + 1, v_scale, mask=head < num_written)
        tl.store(k_to, k_first, mask=writes)
        tl.store(k_to + HALF * k_dim_stride, k_second, mask=writes)
        tl.store(v_to, v_first, mask=writes)
        if v_cache.dtype.element_ty != tl.uint8:
            tl.store(v_to + HALF * v_dim_stride, v_second, mask=writes)


# ------------------------------------------------------------------------------------------------------------ attention


@triton.jit
def _load_block_ids(block_table, tokens, mask, BLOCK_SIZE: tl.constexpr):
    return tl.load(block_table + tokens // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)


@triton.jit
def _joined(halves, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] from its left and its right half."""
    left, right = halves
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def _no_result(ROWS: tl.constexpr, COLUMNS: tl.constexpr, code_type: tl.constexpr):
    """Of no keys: sums of weighted values, in parts if they are codes; largest scores; sums of weights."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if code_type is None:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    else:
        sums = no_parts(ROWS, COLUMNS, code_type)
    return sums, largest, total


@triton.jit
def _weighted_sum(sums, V_LARGEST: tl.constexpr, code_type: tl.constexpr):
    """[ROWS, COLUMNS] of the values themselves."""
    if code_type is None:
        acc = sums
    else:
        acc = whole(sums, code_type) / V_LARGEST
    return acc


@triton.jit
def _store_out(out, offsets, acc, total, mask):
    tl.store(out + offsets, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(partial, place, acc, largest, total, mask, COLUMNS: tl.constexpr):
    """Leave the result of a part of a context in the rows `place`."""
    partial_acc, partial_max, partial_sum = partial
    dim = tl.arange(0, COLUMNS)
    tl.store(partial_acc + place[:, None] * COLUMNS + dim[None, :], acc, mask=mask[:, None])
    tl.store(partial_max + place, largest)
    tl.store(partial_sum + place, total)


@triton.jit(do_not_specialize_on_alignment=["parts"])
def decode_kernel(
    out, q, k_cache, v_cache, scales, block_table, parts,
    cos_sin, q_norm, k_norm, norm_eps,
    partial_acc, partial_max, partial_sum, num_arrived, scale_log2, table_stride,
    k_stride_block, k_stride_head, k_stride_token, k_stride_dim,
    v_stride_block, v_stride_head, v_stride_token, v_stride_dim,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, K_LARGEST: tl.constexpr, V_LARGEST: tl.constexpr, EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (part, key head), the heads of a part side by side. `parts` is what `ContextParts` makes: part i has
    tokens `start` to `end` of the context of a request, whose new token is line `request` of q and out and whose blocks
    are in line `row` of the block table.

    With a `cos_sin`, q is the projection's whole output [requests, (Hq + 2 Hkv) * D], D a power of two: norm (where
    there are norms) and rotation happen here, and the program that has the end of the context caches the new key and
    value. Nothing else of the step writes what the program reads of the cache, so with EARLY its first tile comes while
    the projection is still being computed, in registers that other programs could have had.

    With `scales`, pointing at pairs of float16, each taken as one int32, the cache holds codes up to K_LARGEST and
    V_LARGEST.
    """
    head = tl.program_id(0) % NUM_KV_HEADS
    own_part = tl.program_id(0) // NUM_KV_HEADS
    begin(DEPENDENT)
    own = parts + own_part * PART_COLUMNS  # its columns, in their order; they were staged before the step's kernels
    request = tl.load(own)
    row = tl.load(own + 1)
    start = tl.load(own + 2)
    end = tl.load(own + 3)
    seq_len = tl.load(own + 4)
    first_part = tl.load(own + 5)
    num_parts = tl.load(own + 6)
    table = block_table + tl.maximum(row, 0).to(tl.int64) * table_stride
    code_type: tl.constexpr = None if scales is None else v_cache.dtype.element_ty
    kv = (
        k_cache, v_cache, scales, table, head,
        k_stride_block, k_stride_head, k_stride_token, k_stride_dim,
        v_stride_block, v_stride_head, v_stride_token, v_stride_dim,
    )  # fmt: skip
    if EARLY:
        start = tl.maximum(start, 0)
        present_end = tl.where(request < 0, 0, tl.minimum(end, seq_len - 1))
        first_keys, first_values, first_slots = _load_tile(
            kv, start, present_end, NUM_KV_HEADS, HEAD_DIM, HEAD_COLUMNS, BLOCK_SIZE, TILE, True, False, code_type
        )
    await_previous(DEPENDENT)
    if request < 0:  # room that is not used
        return

    group = tl.arange(0, GROUP_ROWS)
    dim = tl.arange(0, HEAD_COLUMNS)
    in_group = group < GROUP
    in_head = dim < HEAD_DIM
    NUMBER: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    q_rows = (request * NUM_KV_HEADS + head) * GROUP + group
    q_offsets = q_rows[:, None] * HEAD_DIM + dim[None, :]
    sums, largest, total = _no_result(GROUP_ROWS, HEAD_COLUMNS, code_type)
    if cos_sin is None:
        query = tl.load(q + q_offsets, mask=in_group[:, None] & in_head[None, :], other=0.0)
    else:
        NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
        pair_dim = tl.arange(0, HEAD_DIM // 2)
        qkv = q + request.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        angles = cos_sin + (seq_len - 1).to(tl.int64) * HEAD_DIM
        all_pairs = pair_dim[None, :] >= 0
        query = _joined(
            normed_and_rotated(
                qkv, head * GROUP + group, pair_dim, in_group[:, None] & all_pairs, q_norm, norm_eps, angles, HEAD_DIM
            ),
            GROUP_ROWS,
            HEAD_DIM,
        ).to(q.dtype.element_ty)
        if end == seq_len:
            # The new token starts the running result from registers; nothing waits for what is written.
            k_first, k_second = normed_and_rotated(
                qkv, NUM_HEADS + head + tl.arange(0, 1), pair_dim, all_pairs, k_norm, norm_eps, angles, HEAD_DIM
            )
            end = seq_len - 1
            block = tl.load(table + end // BLOCK_SIZE).to(tl.int64)
            k_row = k_cache + head * k_stride_head + block * k_stride_block + end % BLOCK_SIZE * k_stride_token
            v_row = v_cache + head * v_stride_head + block * v_stride_block + end % BLOCK_SIZE * v_stride_token
            v_from = NUM_HEADS + NUM_KV_HEADS + head
            if code_type is None:
                key = _joined((k_first, k_second), 1, HEAD_DIM).to(k_cache.dtype.element_ty)
                value = tl.load(qkv + v_from * HEAD_DIM + dim[None, :]).to(v_cache.dtype.element_ty)
                score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
                sums += value.to(tl.float32)
                tl.store(v_row + dim[None, :] * v_stride_dim, value)
            else:
                k_scale, k_first, k_second = row_codes(k_first, k_second, k_cache.dtype.element_ty, K_LARGEST)
                key = _joined((k_first, k_second), 1, HEAD_DIM)
                even, odd = load_pairs(qkv, v_from + tl.arange(0, 1), pair_dim, all_pairs, HEAD_DIM)
                v_scale, even, odd = row_codes(even, odd, code_type, V_LARGEST)
                if code_type == tl.uint8:
                    tl.store(v_row + pair_dim[None, :] * v_stride_dim, even)
                    numbers = tl.interleave((even & 15).to(tl.float32) - 8.0, (even >> 4).to(tl.float32) - 8.0)
                else:
                    value = tl.interleave(even, odd)
                    tl.store(v_row + dim[None, :] * v_stride_dim, value)
                    numbers = value.to(tl.float32)
                numbers *= (v_scale.to(tl.float32) * V_LARGEST)[:, None]
                sums = add_row(sums, numbers, HEAD_COLUMNS, code_type)
                scales_to = (scales + ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + end % BLOCK_SIZE)).to(
                    tl.pointer_type(tl.float16)
                )
                tl.store(scales_to + tl.arange(0, 1), k_scale)
                tl.store(scales_to + 1 + tl.arange(0, 1), v_scale)
                query_in_cache = query.to(NUMBER).to(tl.float32)
                score = tl.sum(query_in_cache * key.to(tl.float32), 1) * tl.sum(k_scale.to(tl.float32), 0)
            tl.store(k_row + dim[None, :] * k_stride_dim, key)
            largest = score * scale_log2
            total += 1.0
    if code_type is not None:
        query = query.to(NUMBER)

    if EARLY:
        sums, largest, total = _take_tile(
            sums, largest, total, query, first_keys, first_values, scales, first_slots,
            (start + tl.arange(0, TILE) < end)[None, :], scale_log2, True, PRECISION, V_LARGEST, code_type,
        )  # fmt: skip
        start += TILE
    whole_end = start + tl.maximum(end - start, 0) // TILE * TILE
    for first in range(start, whole_end, TILE):
        sums, largest, total = _add_tile(
            sums, largest, total, query, kv, first, end, None, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, HEAD_COLUMNS, BLOCK_SIZE, TILE, False, False, PRECISION, V_LARGEST, code_type,
        )  # fmt: skip
    if whole_end < end:
        sums, largest, total = _add_tile(
            sums, largest, total, query, kv, whole_end, end, None, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, HEAD_COLUMNS, BLOCK_SIZE, TILE, True, False, PRECISION, V_LARGEST, code_type,
        )  # fmt: skip

    out_mask = in_group[:, None] & in_head[None, :]
    acc = _weighted_sum(sums, V_LARGEST, code_type)
    if num_parts == 1:
        _store_out(out, q_offsets, acc, total, out_mask)
        return

    place = (own_part * NUM_KV_HEADS + head) * GROUP_ROWS + group
    _store_part((partial_acc, partial_max, partial_sum), place, acc, largest, total, in_group, HEAD_COLUMNS)
    tl.debug_barrier()  # every thread's part is written before the program counts itself as arrived
    arrived = num_arrived + first_part * NUM_KV_HEADS + head
    if tl.atomic_add(arrived, 1, sem="acq_rel") == num_parts - 1:
        tl.store(arrived, 0)
        largest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        acc = tl.zeros([GROUP_ROWS, HEAD_COLUMNS], tl.float32)
        for part in range(first_part, first_part + num_parts):
            rows = (part * NUM_KV_HEADS + head) * GROUP_ROWS + group
            part_max = tl.load(partial_max + rows, cache_modifier=".cg")
            new_largest = tl.maximum(largest, part_max)
            shrink = tl.exp2(largest - new_largest)
            share = tl.exp2(part_max - new_largest)
            total = total * shrink + tl.load(partial_sum + rows, cache_modifier=".cg") * share
            part_acc = tl.load(
                partial_acc + rows[:, None] * HEAD_COLUMNS + dim[None, :],
                mask=in_group[:, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            acc = acc * shrink[:, None] + part_acc * share[:, None]
            largest = new_largest
        _store_out(out, q_offsets, acc, total, out_mask)


@triton.jit
def _add_tile(
    sums, largest, total, query, kv, first, end, positions, scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    V_LARGEST: tl.constexpr, code_type: tl.constexpr,
):  # fmt: skip
    """The running result with the tokens `first .. first + TILE - 1` of a context, of which all rows see those before
    `end`; or each row those up to its own of `positions`. Otherwise as `_load_tile` and `_take_tile`."""
    keys, values, slots = _load_tile(
        kv, first, end, NUM_KV_HEADS, HEAD_DIM, HEAD_COLUMNS, BLOCK_SIZE, TILE, MASKED, DESCRIBED, code_type
    )
    tokens = first + tl.arange(0, TILE)
    if positions is not None:
        visible = tokens[None, :] <= positions[:, None]
    elif MASKED:
        visible = (tokens < end)[None, :]
    else:
        visible = None
    return _take_tile(
        sums, largest, total, query, keys, values, kv[2], slots, visible, scale_log2,
        MASKED, PRECISION, V_LARGEST, code_type,
    )  # fmt: skip


@triton.jit
def _take_tile(
    sums, largest, total, query, keys, values, scales, slots, visible, scale_log2,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, V_LARGEST: tl.constexpr, code_type: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys [D, TILE] and values [TILE, D or words] to the running result; `scales` of `slots`, if any, of
    which some are none where MASKED."""
    if code_type is None:
        scores = tl.dot(query, keys, input_precision=PRECISION)
    else:
        scores = tl.dot(query, key_numbers(keys, query.dtype), input_precision=PRECISION)
        k_scales, v_scales = load_scales(scales, slots, slots >= 0 if MASKED else None)
        scores *= k_scales[None, :]
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
    shrink = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores * scale_log2 - new_largest[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if code_type is None:
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    else:
        weights = (weights * (v_scales * V_LARGEST)[None, :]).to(query.dtype)
        sums = add_values(sums, shrink, weights, values, code_type, PRECISION)
    return sums, new_largest, total


@triton.jit
def _load_tile(
    kv, first, end,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, DESCRIBED: tl.constexpr, code_type: tl.constexpr,
):  # fmt: skip
    """Keys [D, TILE] and values [TILE, D] of the tokens `first .. first + TILE - 1`; MASKED: some may lie past `end`.

    Beside them the slots of these tokens in the cache of all heads, -1 past the end. Values of a scaled format are
    words of 16 bits, as in kv_triton.py.

    kv: the cache, its scales, the line of the block table, the head, and the strides of keys and values over blocks,
    heads, tokens and dimensions. DESCRIBED: the caches are tensor descriptors over [blocks * heads * block size, D] and
    a tile lies in one block, so it is one copy by the memory unit.
    """
    (
        k_cache, v_cache, _, table, head,
        k_stride_block, k_stride_head, k_stride_token, k_stride_dim,
        v_stride_block, v_stride_head, v_stride_token, v_stride_dim,
    ) = kv  # fmt: skip
    if DESCRIBED:
        block = tl.load(table + first // BLOCK_SIZE)
        row = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + first % BLOCK_SIZE
        slots = row + tl.arange(0, TILE)
        keys = k_cache.load([row, 0]).T
        values = v_cache.load([row, 0])
        if MASKED:  # a weight of 0 does not undo a NaN
            values = tl.where((first + tl.arange(0, TILE) < end)[:, None], values, 0.0)
    else:  # and no early return: what follows one is compiled all the same, and a descriptor has no address
        dim = tl.arange(0, HEAD_COLUMNS)
        in_head = dim < HEAD_DIM
        tokens = first + tl.arange(0, TILE)
        present = tokens < end
        if BLOCK_SIZE % TILE == 0:  # the tile lies in one block
            blocks = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        elif MASKED:
            blocks = _load_block_ids(table, tokens, present, BLOCK_SIZE)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
        offset = tokens % BLOCK_SIZE
        k_tokens = k_cache + head * k_stride_head + blocks * k_stride_block + offset * k_stride_token
        k_pointers = k_tokens[None, :] + dim[:, None] * k_stride_dim
        v_at = head * v_stride_head + blocks * v_stride_block + offset * v_stride_token
        if code_type is None:
            in_value = in_head
            v_pointers = (v_cache + v_at)[:, None] + dim[None, :] * v_stride_dim
        else:
            DIMS: tl.constexpr = 4 if code_type == tl.uint8 else 2  # of a word
            word = tl.arange(0, HEAD_COLUMNS // DIMS)
            in_value = word < HEAD_DIM // DIMS
            v_pointers = v_cache.to(tl.pointer_type(tl.int16)) + (v_at // 2)[:, None] + word[None, :]
        slots = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + offset
        if MASKED:
            slots = tl.where(present, slots, -1)
            keys = tl.load(k_pointers, mask=present[None, :] & in_head[:, None], other=0.0)
            values = tl.load(v_pointers, mask=present[:, None] & in_value[None, :], other=0.0)
        elif HEAD_DIM == HEAD_COLUMNS:
            keys = tl.load(k_pointers)
            values = tl.load(v_pointers)
        else:
            keys = tl.load(k_pointers, mask=in_head[:, None], other=0.0)
            values = tl.load(v_pointers, mask=in_value[None, :], other=0.0)
    return keys, values, slots


@triton.jit(do_not_specialize_on_alignment=["rows", "query_start", "seq_lens", "tiles", "num_tiles"])
def prefill_kernel(
    out, q, k_cache, v_cache, scales, block_table,
    rows, query_start, seq_lens, tiles, num_tiles,
    partial_acc, partial_max, partial_sum, scale_log2, table_stride,
    k_stride_block, k_stride_head, k_stride_token, k_stride_dim,
    v_stride_block, v_stride_head, v_stride_token, v_stride_dim,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERY_ROWS: tl.constexpr, TILE: tl.constexpr, DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, DIAGONAL_STAGES: tl.constexpr, V_LARGEST: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Program (key head, tile), *num_tiles tiles, in the columns of `ContextParts`: a request, its first new token in
    there and, with CUT, the part of the context that is this program's: `start` to `end`.

    Row r of a tile is token r // GROUP and head r % GROUP of the group; a tile has QUERY_ROWS // GROUP tokens. All of
    its rows see the keys of all parts but the last, and some of the last.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    own = tiles + tile * PART_COLUMNS
    request = tl.load(own)
    first_token = tl.load(own + 1)
    first_row = tl.load(query_start + request)
    num_new = tl.load(query_start + request + 1) - first_row
    seq_len = tl.load(seq_lens + request)
    tokens_per_tile: tl.constexpr = QUERY_ROWS // GROUP

    query_row = tl.arange(0, QUERY_ROWS)
    dim = tl.arange(0, HEAD_COLUMNS)
    token = first_token + query_row // GROUP
    wanted = (query_row < tokens_per_tile * GROUP) & (token < num_new)
    positions = seq_len - num_new + token
    q_rows = ((first_row + token) * NUM_KV_HEADS + head).to(tl.int64) * GROUP + query_row % GROUP
    q_offsets = q_rows[:, None] * HEAD_DIM + dim[None, :]
    q_mask = wanted[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0)
    NUMBER: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    code_type: tl.constexpr = None if scales is None else v_cache.dtype.element_ty
    if code_type is not None:
        query = query.to(NUMBER)

    table = block_table + tl.load(rows + request).to(tl.int64) * table_stride
    kv = (
        k_cache, v_cache, scales, table, head,
        k_stride_block, k_stride_head, k_stride_token, k_stride_dim,
        v_stride_block, v_stride_head, v_stride_token, v_stride_dim,
    )  # fmt: skip
    sums, largest, total = _no_result(QUERY_ROWS, HEAD_COLUMNS, code_type)
    first_position = seq_len - num_new + first_token
    end = tl.minimum(first_position + tokens_per_tile, seq_len)
    num_seen_by_all = (first_position + 1) // TILE * TILE
    start = 0
    if CUT:
        start = tl.load(own + 2)
        part_end = tl.load(own + 3)
        end = tl.minimum(end, part_end)
        num_seen_by_all = tl.minimum(num_seen_by_all, part_end)
    for first in tl.range(start, num_seen_by_all, TILE, num_stages=STAGES):
        sums, largest, total = _add_tile(
            sums, largest, total, query, kv, first, end, None, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, HEAD_COLUMNS, BLOCK_SIZE, TILE, False, DESCRIBED, PRECISION, V_LARGEST, code_type,
        )  # fmt: skip
    num_whole = num_seen_by_all
    if DESCRIBED:  # values are multiplied where they were copied to, unless some have to be replaced
        num_whole = tl.minimum(end, seq_len // TILE * TILE)
        for first in tl.range(num_seen_by_all, num_whole, TILE, num_stages=DIAGONAL_STAGES):
            sums, largest, total = _add_tile(
                sums, largest, total, query, kv, first, end, positions, scale_log2,
                NUM_KV_HEADS, HEAD_DIM, HEAD_COLUMNS, BLOCK_SIZE, TILE, False, True, PRECISION, V_LARGEST, code_type,
            )  # fmt: skip
    for first in tl.range(tl.cdiv(num_whole, TILE) * TILE, end, TILE, num_stages=1):
        sums, largest, total = _add_tile(
            sums, largest, total, query, kv, first, end, positions, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, HEAD_COLUMNS, BLOCK_SIZE, TILE, True, DESCRIBED, PRECISION, V_LARGEST, code_type,
        )  # fmt: skip
    acc = _weighted_sum(sums, V_LARGEST, code_type)
    num_parts = 1
    if CUT:
        num_parts = tl.load(own + 6)
    if num_parts == 1:
        _store_out(out, q_offsets, acc, total, q_mask)
    else:
        place = (tile * NUM_KV_HEADS + head) * QUERY_ROWS + query_row
        _store_part((partial_acc, partial_max, partial_sum), place, acc, largest, total, wanted, HEAD_COLUMNS)


@triton.jit(do_not_specialize_on_alignment=["query_start", "tiles", "num_tiles"])
def add_parts_kernel(
    out, query_start, tiles, num_tiles, partial_acc, partial_max, partial_sum,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    QUERY_ROWS: tl.constexpr, ROWS: tl.constexpr, MAX_PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (key head, tile, some of its rows): where the tile is the first part of several, add them up."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    own = tiles + tile * PART_COLUMNS
    num_parts = tl.load(own + 6)
    if (num_parts == 1) | (tl.load(own + 2) > 0):
        return
    request = tl.load(own)
    first_row = tl.load(query_start + request)
    num_new = tl.load(query_start + request + 1) - first_row
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    token = tl.load(own + 1) + row // GROUP
    wanted = (token < num_new) & (row < QUERY_ROWS // GROUP * GROUP)
    STEP: tl.constexpr = NUM_KV_HEADS * QUERY_ROWS
    first_place = (tile * NUM_KV_HEADS + head) * QUERY_ROWS + row
    part = tl.arange(0, MAX_PARTS)
    places = first_place[None, :] + part[:, None] * STEP
    here = (part < num_parts)[:, None]
    maxima = tl.load(partial_max + places, mask=here, other=float("-inf"))
    largest = tl.max(maxima, 0)
    total = tl.sum(tl.load(partial_sum + places, mask=here, other=0.0) * tl.exp2(maxima - largest[None, :]), 0)
    dim = tl.arange(0, HEAD_COLUMNS)
    acc = tl.zeros([ROWS, HEAD_COLUMNS], tl.float32)
    for first in range(0, num_parts, AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            place = first_place + (first + more) * STEP
            is_part = row < tl.where(first + more < num_parts, QUERY_ROWS, 0)  # all rows of it, or none
            part_max = tl.load(partial_max + place, mask=is_part, other=float("-inf"))
            part_acc = tl.load(
                partial_acc + place[:, None] * HEAD_COLUMNS + dim[None, :], mask=(is_part & wanted)[:, None], other=0.0
            )
            acc += part_acc * tl.exp2(part_max - largest)[:, None]
    out_rows = (first_row + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + row % GROUP
    out_mask = wanted[:, None] & (dim < HEAD_DIM)[None, :]
    _store_out(out, out_rows[:, None] * HEAD_DIM + dim[None, :], acc, total, out_mask)
