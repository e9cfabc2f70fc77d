"""Linear layers for few rows against float64: on the GPU where there is one, elsewhere in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.triton_device import DEVICE, ON_GPU  # isort: split

from headway.layers import skinny_gemm
from headway.layers.skinny_gemm import MAX_SPLIT_OUTPUTS, MAX_SPLIT_ROWS, one_row, scaled_linear, split_add, swiglu
from tests.unit.layers.skinny_case import EPS, Operands, assert_near, check_split_add, expected

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

Size = tuple[int, int, torch.dtype]
"""(outputs, inputs, dtype)"""


def sizes(*, small: list[tuple[int, int]], large: list[tuple[int, int]]) -> list[Size]:
    """On a GPU all of them in each dtype; for the interpreter the small ones, with dtypes that take turns."""
    if ON_GPU:
        return [(*size, dtype) for size in small + large for dtype in DTYPES]
    return [(*size, DTYPES[place % len(DTYPES)]) for place, size in enumerate(small)]


# Smaller than a block, a block, a little more, and each of the ways to cut one row's work into blocks.
SMALL = [(1, 1), (7, 13), (33, 127), (32, 128), (31, 129), (6, 1024), (5, 1025), (9, 2048), (9, 2049), (3, 513)]
LARGE = [(1026, 1100), (2048, 1024), (1999, 3001), (4096, 4096), (1024, 12288), (12289, 1000)]
ROWS = range(1, 65) if ON_GPU else (1, 2, 15, 16, 17, 33, 64)


@pytest.fixture(autouse=True)
def dirty_scratch() -> Iterator[None]:
    """Nothing is taken from what was left over, and the counters are as they were."""
    parts, num_arrived = skinny_gemm._scratch(torch.empty(0, device=DEVICE).device)
    parts.fill_(math.nan)
    yield
    assert not num_arrived.any()


# ----------------------------------------------------------------------------------------------------------- one row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("kind", ["plain", "out", "residual", "swiglu", "swiglu_out"])
def test_one_row(kind: str, with_norm: bool, with_bias: bool, dtype: torch.dtype) -> None:
    case = Operands(1, 6, 2100, dtype, gated="swiglu" in kind)
    bias, norm = case.bias if with_bias else None, case.norm if with_norm else None
    residual, out = case.residual if kind == "residual" else None, case.out if kind.endswith("out") else None
    wanted = expected(case.x, case.weight, bias, norm=norm, residual=residual, swiglu="swiglu" in kind)
    got = one_row(case.x, case.weight, bias, norm=norm, eps=EPS, residual=residual, swiglu="swiglu" in kind, out=out)
    assert got.dtype == dtype
    assert residual is None or got is residual
    assert out is None or got is out
    assert_near(got, wanted)
    case.assert_nothing_outside_was_written()


@pytest.mark.parametrize(("outputs", "inputs", "dtype"), sizes(small=SMALL, large=LARGE))
def test_one_row_of_any_size(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    case = Operands(1, outputs, inputs, dtype)
    wanted = expected(case.x, case.weight, case.bias, norm=case.norm, residual=case.residual)
    one_row(case.x, case.weight, case.bias, norm=case.norm, eps=EPS, residual=case.residual)
    assert_near(case.residual, wanted)
    case.assert_nothing_outside_was_written()


@pytest.mark.parametrize(("outputs", "inputs", "dtype"), sizes(small=SMALL, large=LARGE))
def test_one_gated_row_of_any_size(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    case = Operands(1, outputs, inputs, dtype, gated=True)
    got = one_row(case.x, case.weight, None, norm=case.norm, eps=EPS, swiglu=True, out=case.out)
    assert_near(got, expected(case.x, case.weight, None, norm=case.norm, swiglu=True))
    case.assert_nothing_outside_was_written()


def test_norm_of_a_tiny_row_is_held_up_by_eps() -> None:
    case = Operands(1, 5, 100, torch.float32)
    case.x.mul_(1e-4)
    got = one_row(case.x, case.weight, None, norm=case.norm, eps=EPS)
    assert_near(got, expected(case.x, case.weight, None, norm=case.norm))


# ----------------------------------------------------------------------------------------- up to 64 rows, into a sum


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_add(rows: int, dtype: torch.dtype) -> None:
    case = Operands(rows, 75, 700, dtype)
    check_split_add(case, case.bias)


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    sizes(small=SMALL, large=[size for size in LARGE if size[0] <= MAX_SPLIT_OUTPUTS]),
)
def test_split_add_of_any_size(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    check_split_add(Operands(3, outputs, inputs, dtype), None)


def test_most_rows_into_the_widest_sum() -> None:
    """The scratch memory is as large as the largest product needs."""
    check_split_add(Operands(MAX_SPLIT_ROWS, MAX_SPLIT_OUTPUTS, 40, torch.float16), None)


# -------------------------------------------------------------------- up to 64 rows, with the other half of the norm


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_linear(rows: int, dtype: torch.dtype) -> None:
    case = Operands(rows, 75, 300, dtype)
    x = case.scaled_rows(num_parts=10)
    got = scaled_linear(x, case.weight, case.bias, EPS)
    assert got.dtype == dtype
    assert_near(got, expected(x.values, case.weight, case.bias, squares=x.squares))


@pytest.mark.parametrize(("outputs", "inputs", "dtype"), sizes(small=SMALL, large=LARGE))
def test_scaled_linear_of_any_size(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    case = Operands(3, outputs, inputs, dtype)
    x = case.scaled_rows(num_parts=-(-inputs // 32))
    assert_near(scaled_linear(x, case.weight, None, EPS), expected(x.values, case.weight, None, squares=x.squares))


@pytest.mark.parametrize("rows", [1, 19])
def test_both_halves_of_a_norm_are_a_norm(rows: int) -> None:
    before, after = Operands(rows, 75, 130, torch.float32), Operands(rows, 40, 75, torch.float32, gated=True, seed=1)
    scaled = check_split_add(before, before.bias)
    wanted = expected(before.residual, after.weight, after.bias, norm=before.next_norm)
    assert_near(scaled_linear(scaled, after.weight, after.bias, EPS), wanted)
    gated = swiglu(scaled.values, after.weight, after.bias, squares=scaled.squares, eps=EPS)
    assert_near(gated, expected(before.residual, after.weight, after.bias, norm=before.next_norm, swiglu=True))


# ---------------------------------------------------------------------------------------------- up to 64 rows, gated


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(rows: int, dtype: torch.dtype) -> None:
    case = Operands(rows, 75, 300, dtype, gated=True)
    got = swiglu(case.x, case.weight, case.bias)
    assert got.dtype == dtype
    assert_near(got, expected(case.x, case.weight, case.bias, swiglu=True))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_scaled_rows(rows: int, dtype: torch.dtype) -> None:
    case = Operands(rows, 43, 300, dtype, gated=True)
    x = case.scaled_rows(num_parts=3)
    got = swiglu(x.values, case.weight, case.bias, squares=x.squares, eps=EPS)
    assert_near(got, expected(x.values, case.weight, case.bias, squares=x.squares, swiglu=True))


@pytest.mark.parametrize(("outputs", "inputs", "dtype"), sizes(small=[*SMALL, (8193, 3)], large=LARGE))
def test_swiglu_of_any_size(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    case = Operands(3, outputs, inputs, dtype, gated=True)
    assert_near(swiglu(case.x, case.weight, None), expected(case.x, case.weight, None, swiglu=True))


# --------------------------------------------------------------------------------------------------------- each time


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1])
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
    for _ in range(19):
        assert all(torch.equal(one, other) for one, other in zip(results(), first, strict=True))
