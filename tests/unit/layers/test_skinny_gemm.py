"""Linear layers for few rows against float64: on the GPU where there is one, elsewhere in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from tests.triton_device import DEVICE, ON_GPU, choose  # isort: split

from headway.layers import skinny_gemm
from headway.layers.skinny_gemm import MAX_SPLIT_OUTPUTS, MAX_SPLIT_ROWS, one_row, scaled_linear, split_add, swiglu
from tests.unit.layers.skinny_case import EPS, Operands, assert_near, check_split_add, expected

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRODUCTS = ["split_add", "scaled_linear", "swiglu", "swiglu of scaled rows"]
# Smaller than a block, a block, a little more, and each of the ways to cut one row's work into blocks.
SMALL = [(1, 1), (7, 13), (33, 127), (32, 128), (31, 129), (6, 1024), (5, 1025), (9, 2048), (9, 2049), (3, 513)]
LARGE = [(1026, 1100), (2048, 1024), (1999, 3001), (4096, 4096), (1024, 12288), (12289, 1000)]


@pytest.fixture(autouse=True)
def dirty_scratch() -> Iterator[None]:
    """Nothing is taken from what was left over, and the counters are as they were."""
    parts, num_arrived = skinny_gemm._scratch(torch.empty(0, device=DEVICE).device)
    with torch.inference_mode():  # as an engine that made them in this process
        parts.fill_(math.nan)
    yield
    assert not num_arrived.any()


def check(product: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, with_bias: bool) -> None:
    """One product of random operands: up to 64 rows into a sum, with the other half of a norm, or gated."""
    case = Operands(rows, outputs, inputs, dtype, gated="swiglu" in product)
    bias, scaled = case.bias if with_bias else None, case.scaled_rows(num_parts=-(-inputs // 32))
    if product == "split_add":
        check_split_add(case, bias)
        return
    if product == "scaled_linear":
        got = scaled_linear(scaled, case.weight, bias, EPS)
        wanted = expected(case.x, case.weight, bias, squares=scaled.squares)
    elif product == "swiglu":
        got = swiglu(case.x, case.weight, bias)
        wanted = expected(case.x, case.weight, bias, swiglu=True)
    else:
        got = swiglu(scaled.values, case.weight, bias, squares=scaled.squares, eps=EPS)
        wanted = expected(case.x, case.weight, bias, squares=scaled.squares, swiglu=True)
    assert got.dtype == dtype
    assert_near(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("kind", ["plain", "out", "residual", "swiglu", "swiglu_out"])
def test_one_row(kind: str, with_norm: bool, with_bias: bool, dtype: torch.dtype) -> None:
    check_one_row(kind, 6, 2100, dtype, with_norm=with_norm, with_bias=with_bias)


@pytest.mark.parametrize("kind", ["residual", "swiglu_out"])
@pytest.mark.parametrize(
    ("size", "dtype"), choose(itertools.product(SMALL + LARGE, DTYPES), *zip(SMALL, itertools.cycle(DTYPES)))
)
def test_one_row_of_any_size(kind: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    check_one_row(kind, *size, dtype, with_norm=True, with_bias=kind == "residual")


def test_norm_of_a_tiny_row_is_held_up_by_eps() -> None:
    check_one_row("plain", 5, 100, torch.float32, with_norm=True, with_bias=False, scale=1e-4)


def check_one_row(
    kind: str, outputs: int, inputs: int, dtype: torch.dtype, *, with_norm: bool, with_bias: bool, scale: float = 1.0
) -> None:
    case = Operands(1, outputs, inputs, dtype, gated="swiglu" in kind)
    case.x.mul_(scale)
    bias, norm = case.bias if with_bias else None, case.norm if with_norm else None
    residual, out = case.residual if kind == "residual" else None, case.out if kind.endswith("out") else None
    wanted = expected(case.x, case.weight, bias, norm=norm, residual=residual, swiglu="swiglu" in kind)
    got = one_row(case.x, case.weight, bias, norm=norm, eps=EPS, residual=residual, swiglu="swiglu" in kind, out=out)
    assert got.dtype == dtype
    assert residual is None or got is residual
    assert out is None or got is out
    assert_near(got, wanted)
    case.assert_nothing_outside_was_written()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("rows", "dtype"),
    choose(itertools.product(range(1, 65), DTYPES), *zip((1, 2, 15, 16, 17, 33, 64), itertools.cycle(DTYPES))),
)
def test_so_many_rows(product: str, rows: int, dtype: torch.dtype) -> None:
    inputs = 700 if product == "split_add" else 300
    check(product, rows, 43 if product == "swiglu of scaled rows" else 75, inputs, dtype, with_bias=True)


SIZES = [(product, size) for product in PRODUCTS for size in [*SMALL, (8193, 3), *LARGE]]
SIZES = [(product, size) for product, size in SIZES if product != "split_add" or size[0] <= MAX_SPLIT_OUTPUTS]


@pytest.mark.parametrize(
    ("product", "size", "dtype"),
    [
        (product, size, dtype)
        for place, (product, size) in enumerate(SIZES)
        for dtype in choose(DTYPES, DTYPES[place % 3])
        if ON_GPU or size not in LARGE
    ],
)
def test_of_any_size(product: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    check(product, 3, *size, dtype, with_bias=False)


def test_most_rows_into_the_widest_sum() -> None:
    """The scratch memory is as large as the largest product needs."""
    check("split_add", MAX_SPLIT_ROWS, MAX_SPLIT_OUTPUTS, 40, torch.float16, with_bias=False)


@pytest.mark.parametrize("rows", [1, 19])
def test_both_halves_of_a_norm_are_a_norm(rows: int) -> None:
    before, after = Operands(rows, 75, 130, torch.float32), Operands(rows, 40, 75, torch.float32, gated=True, seed=1)
    scaled = check_split_add(before, before.bias)
    wanted = expected(before.residual, after.weight, after.bias, norm=before.next_norm)
    assert_near(scaled_linear(scaled, after.weight, after.bias, EPS), wanted)
    gated = swiglu(scaled.values, after.weight, after.bias, squares=scaled.squares, eps=EPS)
    assert_near(gated, expected(before.residual, after.weight, after.bias, norm=before.next_norm, swiglu=True))


@pytest.mark.parametrize("dtype", choose(DTYPES, torch.float32))
def test_the_same_to_the_bit_each_time(dtype: torch.dtype) -> None:
    """Whichever program is the last to arrive and adds the parts up."""
    outputs, inputs = (1025, 3001) if ON_GPU else (5, 300)
    sums, gated = Operands(5, outputs, inputs, dtype), Operands(5, outputs, inputs, dtype, gated=True)
    row = Operands(1, outputs, inputs, dtype)
    next_weight = Operands(1, 7, outputs, dtype).weight

    def results() -> list[torch.Tensor]:
        residual = sums.residual.clone()
        scaled = split_add(sums.x, sums.weight, sums.bias, residual, sums.next_norm)
        return [
            residual,
            scaled.values,
            scaled.squares,
            scaled_linear(scaled, next_weight, None, EPS),
            swiglu(gated.x, gated.weight, gated.bias),
            one_row(row.x, row.weight, row.bias, norm=row.norm, eps=EPS),
        ]

    first = results()
    for _ in range(19 if ON_GPU else 3):
        assert all(torch.equal(one, other) for one, other in zip(results(), first, strict=True))
