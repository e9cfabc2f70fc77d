"""Blocks go to the host and come back as they were: every layout of the cache, one piece each, over few stages."""

from __future__ import annotations

import random

import pytest
import torch

from tests.triton_device import DEVICE, ON_GPU  # isort: split

from headway.core.kv.moves import BlockMoves
from headway.kv.layer_cache import LayerKVCache
from headway.kv_formats import FORMATS
from headway.transfer.host_blocks import HostBlocks, _as_bytes, apply_moves
from headway.transfer.staged_copies import BlockLayout, move_blocks

NUM_BLOCKS, NUM_SLOTS = 12, 7
PLACES = [("cpu", False), ("cpu", True), *([("cuda", False), ("cuda", True)] if ON_GPU else [])]
"""Where the cache is, and whether slots are there too."""


def random_caches(name: str, *, token_major: bool, device: str) -> list[LayerKVCache]:
    caches = [
        LayerKVCache.zeros(NUM_BLOCKS, 2, 16, 8, dtype=FORMATS[name], device=device, token_major=token_major)
        for _ in range(3)
    ]
    for tensor in (tensor for cache in caches for tensor in cache.tensors):
        _as_bytes(tensor).random_(0, 256)
    return caches


def contents(caches: list[LayerKVCache]) -> torch.Tensor:
    """uint8 [num_blocks, bytes of all tensors]"""
    return torch.cat([_as_bytes(tensor).cpu() for cache in caches for tensor in cache.tensors], 1)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("token_major", [False, True])
def test_gathered_pieces_are_the_blocks_and_scatter_puts_them_back(name: str, token_major: bool) -> None:
    caches = random_caches(name, token_major=token_major, device=DEVICE)
    before = contents(caches)
    views = [_as_bytes(tensor) for cache in caches for tensor in cache.tensors]
    layout = BlockLayout.of(views)
    pieces = torch.zeros(5, before.shape[1], dtype=torch.uint8, device=DEVICE)
    move_blocks(pieces, None, torch.tensor([3, 0, 11], device=DEVICE), layout, to_pieces=True)
    assert torch.equal(pieces[:3].cpu(), before[[3, 0, 11]])
    assert not pieces[3:].any()
    move_blocks(pieces, None, torch.tensor([5, 6, 7], device=DEVICE), layout, to_pieces=False)
    expected = before.clone()
    expected[[5, 6, 7]] = before[[3, 0, 11]]
    assert torch.equal(contents(caches), expected)
    rows, blocks = torch.tensor([4, 0], device=DEVICE), torch.tensor([1, 9], device=DEVICE)
    move_blocks(pieces, rows, blocks, layout, to_pieces=True)
    assert torch.equal(pieces[[4, 0, 1, 2]].cpu(), before[[1, 9, 0, 11]]) and not pieces[3].any()
    move_blocks(pieces, rows, blocks.flip(0).contiguous(), layout, to_pieces=False)
    expected[[9, 1]] = before[[1, 9]]
    assert torch.equal(contents(caches), expected)


@pytest.fixture(params=PLACES, ids=str)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bool]:
    if request.param[0] == "cuda":
        from headway.transfer import staged_copies

        monkeypatch.setattr(staged_copies, "_STAGE_BYTES", 1)  # one block a stage: each is used again at once
    return request.param


def caches_and_host(name: str, place: tuple[str, bool]) -> tuple[list[LayerKVCache], HostBlocks]:
    device, on_device = place
    caches = random_caches(name, token_major=device == "cuda", device=device)
    return caches, HostBlocks(caches, NUM_SLOTS, on_device=on_device)


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
def test_random_moves_are_those_of_plain_lists(name: str, place: tuple[str, bool]) -> None:
    """Blocks and slots as rows of two plain tensors: whatever is moved, the cache holds the same."""
    caches, host = caches_and_host(name, place)
    blocks = contents(caches)
    slots = torch.zeros(NUM_SLOTS, blocks.shape[1], dtype=torch.uint8)
    rng = random.Random(0)
    for _ in range(60):
        out = list(zip(rng.sample(range(NUM_BLOCKS), 3), rng.sample(range(NUM_SLOTS), 3)))
        copied = list(zip(rng.sample(range(NUM_BLOCKS), 2), rng.sample(range(NUM_BLOCKS), 2)))
        moved_in = list(zip(rng.sample(range(NUM_SLOTS), 4), rng.sample(range(NUM_BLOCKS), 4)))
        apply_moves(caches, host, BlockMoves(tuple(out), tuple(copied), tuple(moved_in)))
        for block, slot in out:
            slots[slot] = blocks[block]
        read = [blocks[source].clone() for source, _ in copied]
        for (_, target), row in zip(copied, read):
            blocks[target] = row
        for slot, block in moved_in:
            blocks[block] = slots[slot]
    assert torch.equal(contents(caches), blocks)
    assert host.measure_restore() > 0.0
    assert not contents(caches)[:NUM_SLOTS].any(), "the measurement leaves empty blocks"


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
def test_blocks_are_copied_out_as_they_were(name: str, place: tuple[str, bool]) -> None:
    """To memory of the host and of the device, before what is queued afterwards writes over them."""
    (caches, host), device = caches_and_host(name, place), place[0]
    before = contents(caches)
    host.move_out([(4, 2), (5, 6)])
    for target in {"cpu", device}:
        pieces = torch.zeros(6, host.slot_bytes, dtype=torch.uint8, device=target)
        if device == "cuda" and target == "cpu":
            pieces = pieces.pin_memory()
        wait = host.copy_out([(3, 1), (9, 4), (0, 5)], [(2, 0), (6, 2)], pieces)
        host.move_in([(2, 3), (2, 9)])
        wait()
        assert torch.equal(pieces[[1, 4, 5, 0, 2]].cpu(), before[[3, 9, 0, 4, 5]]) and not pieces[3].any()
        before[[3, 9]] = before[[4, 4]]
    assert host.copy_out([], [], pieces) is not None
