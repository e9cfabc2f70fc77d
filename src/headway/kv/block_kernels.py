"""One kernel that brings KV blocks, which lie in many tensors, together in one piece each, or puts them back."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS_AT_A_TIME = 4096


@dataclass(frozen=True)
class BlockLayout:
    """Where the parts of a block are, tensor by tensor, in words of 4 bytes. All int64 on the device."""

    addresses: Tensor
    """Of the tensors."""
    num_words: Tensor
    """That each tensor has of a block."""
    offsets: Tensor
    """Of each tensor's words in the block as one piece."""
    most_words: int

    @staticmethod
    def of(blocks: Sequence[Tensor]) -> BlockLayout:
        """`blocks`: uint8 [num_blocks, bytes] each. They must stay where they are."""
        device = blocks[0].device
        sizes = [tensor.shape[1] for tensor in blocks]
        assert all(size % 4 == 0 for size in sizes), "a block of the KV cache is not made of whole words"
        num_words = torch.tensor([size // 4 for size in sizes], dtype=torch.int64)
        addresses = torch.tensor([tensor.data_ptr() for tensor in blocks], dtype=torch.int64)
        return BlockLayout(
            addresses=addresses.to(device),
            num_words=num_words.to(device),
            offsets=(num_words.cumsum(0) - num_words).to(device),
            most_words=max(sizes) // 4,
        )

    def grid(self, num_blocks: int) -> tuple[int, int, int]:
        return num_blocks, len(self.addresses), triton.cdiv(self.most_words, _WORDS_AT_A_TIME)


@triton.jit
def _move_kernel(
    pieces, blocks, addresses, num_words, offsets, piece_words, TO_PIECES: tl.constexpr, WORDS: tl.constexpr
):
    """Words of one tensor's part of one block. Program (place in `pieces`, tensor, which words)."""
    place, tensor = tl.program_id(0), tl.program_id(1)
    count = tl.load(num_words + tensor)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    present = words < count
    tensor_start = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    in_cache = tensor_start + tl.load(blocks + place) * count + words
    in_piece = pieces + place.to(tl.int64) * piece_words + tl.load(offsets + tensor) + words
    if TO_PIECES:
        tl.store(in_piece, tl.load(in_cache, mask=present), mask=present)
    else:
        tl.store(in_cache, tl.load(in_piece, mask=present), mask=present)


def gather_blocks(pieces: Tensor, blocks: Tensor, layout: BlockLayout) -> None:
    """pieces[i] = block blocks[i], for all of `blocks`; pieces uint8 [at least so many, bytes of a block]"""
    _move(pieces, blocks, layout, to_pieces=True)


def scatter_blocks(pieces: Tensor, blocks: Tensor, layout: BlockLayout) -> None:
    """block blocks[i] = pieces[i], likewise"""
    _move(pieces, blocks, layout, to_pieces=False)


def _move(pieces: Tensor, blocks: Tensor, layout: BlockLayout, *, to_pieces: bool) -> None:
    words = pieces.view(torch.int32)
    _move_kernel[layout.grid(len(blocks))](
        words,
        blocks,
        layout.addresses,
        layout.num_words,
        layout.offsets,
        words.stride(0),
        TO_PIECES=to_pieces,
        WORDS=_WORDS_AT_A_TIME,
    )
