"""The Triton kernels of attention against float64: on the GPU where there is one, elsewhere in Triton's interpreter.

The interpreter takes a millisecond or so for each tile, so it gets a set of shapes that has every value and every path
once or more; a GPU gets all shapes, and longer contexts. tests/gpu/test_kernels.py has the sizes of real use.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.triton_device import DEVICE, ON_GPU, choose  # isort: split

from headway.attention import triton_paged
from headway.attention.triton_paged import END, NUM_PARTS, REQUEST, START, TritonPagedAttention
from headway.errors import ConfigError
from headway.kv.layer_cache import LayerKVCache
from tests.unit.attention.paged_case import Length, PagedCase, Shape

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BY_TOKEN, TRANSPOSED = True, False

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 7, 8, 16)
BLOCK_SIZES = (1, 8, 16, 64, 128, 256)


def all_shapes() -> list[Shape]:
    """Every head dim, group and block size. Dtypes and layouts take turns, so that each meets each value."""
    formats = list(itertools.product((BF16, F16, F32), (BY_TOKEN, TRANSPOSED)))
    shapes = []
    for d, head_dim in enumerate(HEAD_DIMS):
        for g, group in enumerate(GROUPS):
            for b, block_size in enumerate(BLOCK_SIZES):
                dtype, token_major = formats[(d + g + b) % len(formats)]
                shapes.append(Shape(head_dim, group, block_size, dtype, token_major, num_kv_heads=1 + (d + g) % 3))
    return shapes


# Every eleventh has each value, and heads and blocks whose tiles the memory unit copies as a whole.
SHAPES = all_shapes() if ON_GPU else all_shapes()[::11]
SHAPES += [
    dataclasses.replace(shape, quantised=quantised)
    for shape, quantised in zip(all_shapes()[::23], itertools.cycle(["fp8", "int8", "int4"]))
]


def lengths_for(shape: Shape) -> list[Length]:
    """A step of single tokens, prompts and chunks of prompts around the bounds of blocks and tiles."""
    block = shape.block_size
    if not ON_GPU:
        prompt = min(33, 1 + 128 // shape.group)
        singles = {1, 2, block - 1, block, block + 1} - {0}
        return [(1, length) for length in sorted(singles)] + [(prompt, prompt), (2, block + 2)]
    singles = {1, 2, 3, 63, 64, 65, block - 1, block, block + 1, 2 * block, 1000} - {0}
    chunks = [(2, 2), (64, 64), (block + 1, block + 1), (200, 200), (3, block + 2), (33, 2 * block + 33), (130, 1000)]
    return [(1, length) for length in sorted(singles)] + chunks


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device for 16 programs, so that contexts are cut in the same way on every machine."""
    monkeypatch.setattr(triton_paged, "num_processors", lambda device: 4)


def plain(**changes: Any) -> Shape:
    """A shape that is cheap to compute."""
    shape = Shape(head_dim=64, group=2, block_size=16, dtype=F32, token_major=BY_TOKEN, num_kv_heads=1)
    return dataclasses.replace(shape, **changes)


# ------------------------------------------------------------------------------------------------- shapes and lengths


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_step(shape: Shape) -> None:
    PagedCase(shape, lengths_for(shape)).check()


LONGEST = 32_768 if ON_GPU else 600
SINGLE_TOKENS = [(1, length) for length in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 600)]
# Around the tiles of queries (8 tokens in float32, 42 in half precision) and of keys (32 and 64).
PROMPTS = [(new, new) for new in (2, 7, 8, 9, 31, 32, 33, 42, 43, 64, 65)]
CHUNKS = [(2, 3), (2, 32), (2, 33), (2, 64), (2, 65), (9, 40), (42, 64), (43, 107), (17, 600)]
# Scores in the hundreds, whose exponentials overflow unless the largest is known; the largest comes anywhere.
SHARP = [(1, 200), (1, 65), (19, 19), (5, 130)]
STEPS: list[tuple[str, list[Length], list[Shape]]] = [
    ("single tokens", SINGLE_TOKENS, [plain(), plain(dtype=F16)]),
    ("prompts", PROMPTS, [plain(group=4), plain(group=3, dtype=BF16, block_size=64)]),
    ("chunks", CHUNKS, [plain(group=4), plain(group=3, dtype=BF16, block_size=64), plain(quantised="int8")]),
    ("sharp scores", SHARP, [plain(dtype=F16), plain(dtype=BF16)]),
]
# An odd number of requests; and few long contexts, which as many programs share as there are, unevenly.
STEPS += [("many", [(1, 1 + 7 * r % 40) for r in range(count)], [plain(num_kv_heads=2)]) for count in (3, 17, 33)]
STEPS += [
    ("long contexts", [(1, LONGEST - 77 * r) for r in range(count)], [plain(dtype=F16, quantised=quantised)])
    for count, quantised in choose(
        itertools.product((1, 2, 5), (None, "fp8", "int8", "int4")), (5, None), (1, "fp8"), (2, "int8"), (5, "int4")
    )
]


@pytest.mark.parametrize(
    ("name", "lengths", "shape"),
    [
        pytest.param(name, lengths, shape, id=f"{len(lengths)} {name}-{shape}")
        for name, lengths, shapes in STEPS
        for shape in shapes
    ],
)
def test_step(name: str, lengths: list[Length], shape: Shape) -> None:
    PagedCase(shape, lengths, sharpness=64.0 if name == "sharp scores" else 1.0).check()


CUT_SHAPES = [
    plain(),
    plain(group=3, block_size=8, num_kv_heads=2),
    Shape(64, 2, 64, BF16, BY_TOKEN, num_kv_heads=1),
    Shape(128, 4, 64, F16, BY_TOKEN, num_kv_heads=1),
    Shape(80, 4, 16, BF16, TRANSPOSED, num_kv_heads=1),
    Shape(64, 3, 64, BF16, BY_TOKEN, num_kv_heads=1, quantised="fp8"),
    Shape(128, 3, 64, BF16, BY_TOKEN, num_kv_heads=1, quantised="int4"),
]
CUT_LENGTHS: list[list[Length]] = [[(3, 700)], [(2, 64 + 2), (5, 500)], [(1, 90), (9, 801)]]


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(
    ("shape", "lengths"),
    choose(itertools.product(CUT_SHAPES, CUT_LENGTHS), *zip(CUT_SHAPES, itertools.cycle(CUT_LENGTHS), strict=False)),
    ids=str,
)
def test_contexts_of_few_new_tokens_are_cut(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, lengths: list[Length]
) -> None:
    """Also where a step has room for more, and twice: whoever adds up leaves nothing behind."""
    monkeypatch.setattr(triton_paged, "_LEAST_PREFILL_TILES", 1)
    monkeypatch.setattr(triton_paged, "_LEAST_HALF_TILES", 1)
    case = PagedCase(shape, lengths)
    tiles = case.batch(range(len(lengths))).tiles
    assert tiles is not None and (tiles[:, NUM_PARTS] > 1).any()
    case.check()
    case.check_room_changes_nothing()


@pytest.mark.usefixtures("four_processors")
def test_only_large_parts_of_contexts_are_worth_a_program() -> None:
    backend = PagedCase(plain(dtype=BF16, head_dim=128, block_size=64), [(1, 1)]).backend
    lens, few = np.array([30]), triton_paged._LEAST_PREFILL_TILES * 64
    for length, num_parts in ((few, 1), (2 * few, 2), (1000 * few, 8)):  # 4 processors, two each
        tiles = backend.query_tiles(lens, lens + length, 0, num_tokens=30)
        assert len(tiles) == num_parts == tiles[0, NUM_PARTS]
        assert tiles[1:, START].tolist() == tiles[:-1, END].tolist() and tiles[0, START] == 0
        assert (tiles[:, START] % 64 == 0).all() and tiles[-1, END] > 2**20
    # Where each processor has a program without that, long contexts are halved; where it has several, none is cut.
    lens, few = np.array([180]), triton_paged._LEAST_HALF_TILES * 64
    for length, num_parts in ((few, 1), (2 * few, 2), (1000 * few, 2)):
        assert (backend.query_tiles(lens, lens + length, 0, num_tokens=180)[:, NUM_PARTS] == num_parts).all()
    for lens in (np.array([2000]), np.array([30] * 5)):
        tiles = backend.query_tiles(lens, lens + 100_000, 0, num_tokens=int(lens.sum()))
        assert (tiles[:, NUM_PARTS] == 1).all()


def test_a_prompt_in_chunks() -> None:
    """Later tokens of the prompt are in the cache already and must stay unseen; the last chunk is a single token."""
    case = PagedCase(plain(), [(41, 41)])
    for first, last in [(0, 17), (17, 40), (40, 41)]:
        case.part(0, first, last).check()
    assert case.part(0, 40, 41).batch([0]).num_single == 1


# ------------------------------------------------------------------------------------ rotation and cache in the kernel

SINGLES = [(1, 1), (1, 2), (1, 16), (1, 17), (1, 64), (1, 65), (1, 130)]


FUSED_SHAPES = [shape for shape in SHAPES if shape.head_dim in (64, 128, 256)]


@pytest.mark.parametrize(
    ("shape", "with_norms"),
    choose(
        itertools.product(FUSED_SHAPES, (False, True)),
        *zip(FUSED_SHAPES, itertools.cycle([False, True]), strict=False),
    ),
    ids=str,
)
def test_rotation_and_cache_write_in_the_kernel(shape: Shape, with_norms: bool) -> None:
    PagedCase(shape, SINGLES).check_qkv(with_norms=with_norms)


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize("num_requests", [1, 3])
def test_only_the_last_part_of_a_context_has_the_new_token(num_requests: int) -> None:
    """Of 65 and of 129 tokens in tiles of 32 the last part has nothing but the new one."""
    PagedCase(plain(), [(1, length) for length in (65, 300, 129)[:num_requests]]).check_qkv()


def test_rotation_in_a_step_with_room() -> None:
    PagedCase(plain(num_kv_heads=2), SINGLES).check_qkv(extra=9)


def test_rotation_is_apart_where_it_does_not_pay() -> None:
    many = PagedCase(plain(), [(1, 1)] * (triton_paged.MAX_FUSED_REQUESTS + 1))
    for case, chosen in (
        (many, range(len(many.lengths))),
        (PagedCase(plain(), [(1, 5), (2, 4)]), range(2)),
        (PagedCase(plain(head_dim=80), [(1, 5)]), range(1)),
    ):
        case.backend.plan(case.batch(chosen))
        assert not case.backend.takes_qkv
    many.backend.plan(many.batch(range(triton_paged.MAX_FUSED_REQUESTS)))
    assert many.backend.takes_qkv


# ------------------------------------------------------------------------------------- what a result may depend on


@pytest.mark.usefixtures("four_processors")
def test_a_single_token_does_not_depend_on_its_neighbours() -> None:
    """Except through the number of parts that its context is cut into: 10 alone, 2 beside two longer ones."""
    case = PagedCase(plain(), [(1, 300), *((1, 5 + 9 * r) for r in range(11)), *((1, 700) for _ in range(2))])

    def num_parts(chosen: Sequence[int]) -> int:
        parts = case.batch(chosen).parts
        assert parts is not None
        return int((parts[:, REQUEST] == list(chosen).index(0)).sum())

    beside_two, beside_others = [0, 12, 13, 3, 4], [4, 13, 0, 12, 5, 1]
    assert [num_parts(chosen) for chosen in ([0], beside_two, beside_others)] == [10, 2, 2]
    assert torch.equal(case.run(beside_two)[0], case.run(beside_others)[2])
    for chosen in ([0], beside_two, range(12), range(14)):
        case.check(chosen)


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize("shape", [plain(group=4), plain(dtype=F16, block_size=64)], ids=str)
def test_a_chunk_does_not_depend_on_its_neighbours(shape: Shape) -> None:
    case = PagedCase(shape, [(1, 40), (1, 3), (9, 70), (20, 20), (2, 33)])
    alone = case.run([2])[0]
    assert torch.equal(alone, case.run()[2])
    assert torch.equal(alone, case.run([1, 4, 3, 2])[3])


@pytest.mark.usefixtures("four_processors")
def test_the_same_to_the_bit_each_time() -> None:
    """Whichever program is the last to arrive and adds the parts up."""
    lengths = [(1, 20_000), (1, 70), (3, 5)] if ON_GPU else [(1, 70), (3, 5)]
    case = PagedCase(plain(), lengths)
    case.check()
    first = torch.cat(case.run())
    for _ in range(19 if ON_GPU else 5):
        assert torch.equal(torch.cat(case.run()), first)


def test_padding_changes_nothing() -> None:
    case = PagedCase(plain(), [(1, 33), (1, 1), (1, 80)])
    before = [tensor.clone() for tensor in (case.cache.k, case.cache.v)]
    for num_padding in (1, 5, 30):
        case.check(num_padding=num_padding)
    assert case.run([], num_padding=3) == []
    for tensor, was in zip((case.cache.k, case.cache.v), before, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.int32), was.contiguous().view(torch.int32))


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize("lengths", [[(1, 100), (1, 3)], [(1, 70), (5, 70), (30, 30)], [(9, 9)]], ids=str)
@pytest.mark.parametrize("shape", [plain(), plain(dtype=F16, block_size=64)], ids=str)
def test_room_for_more_changes_nothing(shape: Shape, lengths: list[Length]) -> None:
    """A step whose numbers are limits is the step of the numbers on the device, to the bit."""
    PagedCase(shape, lengths).check_room_changes_nothing()


@pytest.mark.parametrize("block_size", [16, 64])
def test_each_layer_has_its_own_cache(block_size: int) -> None:
    case = PagedCase(plain(dtype=F16, block_size=block_size), [(1, 40), (5, 70)])
    other = PagedCase(case.shape, case.lengths, seed=1)
    backend = TritonPagedAttention([other.cache, case.cache], case.shape.num_heads)
    backend.plan(case.batch([0, 1]))
    assert torch.equal(backend.run(1, case.queries([0, 1])).flatten(), torch.cat(case.run()).flatten())


# -------------------------------------------------------------------------------------------------- work and memory


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tiles_have_each_new_token_once(group: int, dtype: torch.dtype) -> None:
    backend = PagedCase(plain(group=group, dtype=dtype), [(1, 1)]).backend
    lens = np.array([1, 1, 2, 7, 8, 9, 128, 300])
    tiles = backend.query_tiles(lens, lens, 2, num_tokens=int(lens.sum()))
    assert tiles.dtype == np.int32
    whole = tiles[tiles[:, START] == 0]
    ends = {(r, first): first + backend._query_rows // group for r, first in whole[:, :2].tolist()}
    assert len(ends) == len(whole)
    for request, num_new in enumerate(lens.tolist()):
        own = sorted((first, end) for (r, first), end in ends.items() if r == request)
        tokens = [token for first, end in own for token in range(first, min(end, num_new))]
        assert tokens == (list(range(num_new)) if request >= 2 else [])


def test_limit_for_tiles() -> None:
    random = np.random.default_rng(0)
    for group in GROUPS:
        backend = PagedCase(plain(group=group, dtype=BF16), [(1, 1)]).backend
        for num_requests in (1, 2, 9):
            for most_tokens in (2, 20, 300):
                lens = random.integers(2, most_tokens + 1, num_requests)
                limit = backend.max_tiles(int(lens.sum()), num_requests)
                before = random.integers(0, 3000, num_requests)
                assert len(backend.query_tiles(lens, before + lens, 0, num_tokens=int(lens.sum()))) <= limit


@pytest.mark.parametrize(
    ("num_processors", "lengths"),
    [(1, [33]), (1, [33] * 3), (4, [33] * 10), (4, [600, 3, 3, 3]), (4, [100] * 5 + [45] * 9), (30, [65] * 80)],
)
def test_parts_stay_within_their_memory(
    num_processors: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_paged, "num_processors", lambda device: num_processors)
    case = PagedCase(plain(), [(1, length) for length in lengths])
    framed = {}
    for name in ("_partial_acc", "_partial_max", "_partial_sum", "_num_arrived"):
        own = getattr(case.backend, name)
        framed[name] = torch.cat([own, torch.full((4096,), 7, dtype=own.dtype, device=DEVICE)])
        monkeypatch.setattr(case.backend, name, framed[name][: len(own)])
    case.check()
    for name, memory in framed.items():
        assert bool((memory[-4096:] == 7).all()), name


# ----------------------------------------------------------------------------------------------------------- errors


def test_heads_must_share_evenly() -> None:
    cache = LayerKVCache.zeros(1, 3, 64, 16, dtype=F32, device=DEVICE)
    with pytest.raises(ConfigError, match="4 query heads cannot share 3 key heads evenly"):
        TritonPagedAttention([cache], 4)


@pytest.mark.parametrize("missing", ["rows", "parts", "tiles"])
def test_a_batch_without_what_the_kernels_read_is_refused(missing: str) -> None:
    case = PagedCase(plain(), [(1, 3), (2, 2)])
    with pytest.raises(ValueError, match=missing):
        case.backend.plan(dataclasses.replace(case.batch([0, 1]), **{missing: None}))
