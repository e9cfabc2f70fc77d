"""Edits of logits in Triton: the device's side of `logit_edits.py`.

masks        rule out tokens that guided rows may not choose; in place if they are the only edits
entries      bans, biases and bad words, one entry each
penalties    repetition, frequency and presence, by a dense table of the tokens that each row has seen
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runner.logit_edits import ONE_OUTPUT, StepEdits, seen_tokens
from headway.runner.sampler import Int32Array, RowRecord, Seat, record_word

_WORDS = tl.constexpr(RowRecord.itemsize // 4)
_REPETITION = tl.constexpr(record_word("repetition"))
_FREQUENCY = tl.constexpr(record_word("frequency"))
_PRESENCE = tl.constexpr(record_word("presence"))
_ONE_OUTPUT = tl.constexpr(ONE_OUTPUT)

EDIT_ENTRIES = 128
PENALTY_TILE = 2048
MASK_WORDS = 64


class TritonEdits:
    """The edits of a device's rows. `upload` copies arrays to the device in one copy, without waiting.

    `token_rows` int32 [max_num_seqs, max_model_len] holds the tokens of all rows, `table` their records.
    """

    def __init__(
        self, *, token_rows: Tensor, table: Tensor, vocab_size: int, upload: Callable[..., Sequence[Tensor]]
    ) -> None:
        self._token_rows = token_rows
        self._table = table
        self._vocab_size = vocab_size
        self._upload = upload
        self.seen: Tensor | None = None
        """int32 [max_num_seqs, V], allocated once a row has penalties: the entries described at `IN_PROMPT`."""

    def seat(self, row_ids: Tensor, entries: Tensor) -> None:
        """Write the tokens that requests in these rows have seen: `seen_entries`, on the device."""
        if self.seen is None:
            shape = (len(self._token_rows), self._vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.int32, device=self._token_rows.device)
        self.seen.index_fill_(0, row_ids.long(), 0)
        self.seen.index_put_((entries[0].long(), entries[1].long()), entries[2])

    def apply(
        self, logits: Tensor, *, row_ids: Tensor, positions: Tensor, edits: StepEdits, keep_logits: bool
    ) -> Tensor:
        """Apply all edits to the logits [R, V]. Returns the same memory if there are only masks and `keep_logits` is
        false, and otherwise a float32 copy."""
        adds = edits.entries is not None or edits.penalised
        edited = logits.to(torch.float32, copy=True) if adds or keep_logits else logits
        if edits.masks is not None:
            lines, words = self._upload(edits.masks.lines, edits.masks.words)
            num_words = triton.cdiv(self._vocab_size, 32)
            _mask_kernel[(len(lines), triton.cdiv(num_words, MASK_WORDS))](
                edited, edited.stride(0), self._vocab_size, lines, words, words.stride(0), WORDS=MASK_WORDS, num_warps=4
            )
        if edits.entries is not None:
            columns, prefixes = self._upload(edits.entries.columns, edits.entries.prefixes)
            num_entries, longest = columns.shape[1], int(edits.entries.columns[-1].max())
            _edit_kernel[(triton.cdiv(num_entries, EDIT_ENTRIES),)](
                edited, edited.stride(0), row_ids, positions,
                self._token_rows, self._token_rows.stride(0), self._token_rows.shape[1],
                columns, num_entries, prefixes, longest, ENTRIES=EDIT_ENTRIES, num_warps=4,
            )  # fmt: skip
        if edits.penalised:
            num_lines, vocab_size = edited.shape
            offsets = row_ids
            if edits.line_offsets is not None:
                (offsets,) = self._upload(edits.line_offsets.astype(np.int32))
            _penalty_kernel[(num_lines, triton.cdiv(vocab_size, PENALTY_TILE))](
                edited, edited.stride(0), vocab_size, row_ids, self._table, self.seen,
                positions, offsets, self._token_rows, self._token_rows.stride(0),
                HAS_DRAFTS=edits.line_offsets is not None, TILE=PENALTY_TILE, num_warps=4,
            )  # fmt: skip
        return edited


def seen_entries(seats: Sequence[Seat]) -> Int32Array:
    """Row, token and entry of each distinct token of requests; int32 [3, E]."""
    found = [(seat.row, *seen_tokens(seat.request)) for seat in seats]
    parts = [np.stack([np.full_like(tokens, row), tokens, entries]) for row, tokens, entries in found]
    return np.concatenate(parts, axis=1)


@triton.jit(do_not_specialize_on_alignment=["lines", "words"])
def _mask_kernel(logits, line_stride, vocab_size, lines, words, word_stride, WORDS: tl.constexpr):
    """Program (masked line, group of words)."""
    line = tl.load(lines + tl.program_id(0)).to(tl.int64)
    places = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(words + tl.program_id(0) * word_stride + places, mask=places * 32 < vocab_size, other=0)
    ids = places[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_out = ((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) == 0
    tl.store(logits + line * line_stride + ids, float("-inf"), mask=is_out & (ids < vocab_size))


@triton.jit(
    do_not_specialize=["num_entries", "longest"],
    do_not_specialize_on_alignment=["row_ids", "positions", "entries", "prefixes"],
)
def _edit_kernel(
    logits,
    line_stride,
    row_ids,
    positions,
    token_rows,
    token_row_stride,
    max_model_len,
    entries,
    num_entries,
    prefixes,
    longest,
    ENTRIES: tl.constexpr,
):
    """Program (group of entries). See `LogitEntries` for what an entry is."""
    places = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    applies = places < num_entries
    line = tl.load(entries + places, mask=applies, other=0)
    token = tl.load(entries + num_entries + places, mask=applies, other=0)
    value = tl.load(entries + 2 * num_entries + places, mask=applies, other=0).to(tl.float32, bitcast=True)
    prefix = tl.load(entries + 3 * num_entries + places, mask=applies, other=0)
    length = tl.load(entries + 4 * num_entries + places, mask=applies, other=0)
    row = tl.load(row_ids + line, mask=applies, other=0).to(tl.int64)
    first = tl.load(positions + line, mask=applies, other=0) - length
    for step in range(longest):
        compares = applies & (step < length)
        wanted = tl.load(prefixes + prefix + step, mask=compares, other=0)
        exists = compares & (first + step >= 0) & (first + step < max_model_len)
        present = tl.load(token_rows + row * token_row_stride + first + step, mask=exists, other=-1)
        applies = applies & ((step >= length) | (present == wanted))
    # A ban and a bias may meet at one token: whichever comes first, -inf remains.
    where = logits + line.to(tl.int64) * line_stride + token
    is_ban = value == float("-inf")
    tl.store(where, value, mask=applies & is_ban)
    tl.atomic_add(where, value, mask=applies & (value > float("-inf")))


@triton.jit(do_not_specialize_on_alignment=["row_ids", "positions", "offsets"])
def _penalty_kernel(
    logits, line_stride, vocab_size, row_ids, table, seen, positions, offsets, token_rows, token_row_stride,
    HAS_DRAFTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (line, tile). With drafts, `offsets` says how many of them stand before the line's position: they count
    as output."""
    line = tl.program_id(0)
    row = tl.load(row_ids + line).to(tl.int64)
    record = table + row * _WORDS
    repetition = tl.load((record + _REPETITION).to(tl.pointer_type(tl.float32)))
    frequency = tl.load((record + _FREQUENCY).to(tl.pointer_type(tl.float32)))
    presence = tl.load((record + _PRESENCE).to(tl.pointer_type(tl.float32)))
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = ids < vocab_size
    entry = tl.load(seen + row * vocab_size + ids, mask=exists, other=0)
    if HAS_DRAFTS:
        place = token_rows + row * token_row_stride + tl.load(positions + line)
        for back in range(tl.load(offsets + line)):
            entry += tl.where(ids == tl.load(place - 1 - back), _ONE_OUTPUT, 0)
    is_seen = exists & (entry != 0)
    where = logits + line.to(tl.int64) * line_stride + ids
    value = tl.load(where, mask=is_seen, other=0.0)
    value = tl.where(value > 0, value / repetition, value * repetition)
    count = (entry // _ONE_OUTPUT).to(tl.float32)
    value -= frequency * count + tl.where(count > 0, presence, 0.0)
    tl.store(where, value, mask=is_seen)
