"""Triton kernels that keep the permanent rows of requests up to date and read a step's batch from them."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_stride"])
def seat_kernel(token_rows, row_stride, tokens, starts, rows, BLOCK: tl.constexpr):
    """Program (request, tile): tokens[starts[i] .. starts[i + 1] - 1] become the beginning of row rows[i]."""
    request = tl.program_id(0)
    start = tl.load(starts + request)
    length = tl.load(starts + request + 1) - start
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < length
    row = token_rows + tl.load(rows + request).to(tl.int64) * row_stride
    tl.store(row + offset, tl.load(tokens + start + offset, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_entries", "table_stride"])
def append_blocks_kernel(block_table, table_stride, entries, num_entries, BLOCK: tl.constexpr):
    """block_table[row, place] = block for each of the entries (row, place, block)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    row = tl.load(entries + 3 * entry, mask=mask).to(tl.int64)
    place = tl.load(entries + 3 * entry + 1, mask=mask)
    block = tl.load(entries + 3 * entry + 2, mask=mask)
    tl.store(block_table + row * table_stride + place, block, mask=mask)


@triton.jit(do_not_specialize=["row_stride", "table_stride"], do_not_specialize_on_alignment=["num_requests"])
def gather_kernel(
    token_ids,
    positions,
    slots,
    num_requests,
    token_rows,
    row_stride,
    block_table,
    table_stride,
    rows,
    query_start,
    seq_lens,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (request, tile): ids, positions and slots of the request's new tokens. A length of 0 marks padding.

    `num_requests` is read from device memory: a captured step has programs for more.
    """
    request = tl.program_id(0)
    if request >= tl.load(num_requests):
        return
    start = tl.load(query_start + request)
    num_new = tl.load(query_start + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    row = tl.load(rows + request).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < num_new
    real = offset < tl.minimum(num_new, seq_len)
    position = seq_len - num_new + offset
    token = tl.load(token_rows + row * row_stride + position, mask=real, other=0)
    block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids + start + offset, token, mask=mask)
    tl.store(positions + start + offset, tl.where(real, position, 0), mask=mask)
    tl.store(slots + start + offset, tl.where(real, slot, -1), mask=mask)
