"""The kernels for quantised weights, against float64 sums of the weights that the codes stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.triton_device import DEVICE, ON_GPU, choose  # isort: split

from headway.layers import quantized_gemm as gemm
from headway.layers.quantized_weight import FP8, QuantizedWeight, quantise
from headway.layers.skinny_gemm import one_row

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5
# Outputs that fill their last tile and such that do not; inputs that fill their last block of words and not.
SHAPES = [(96, 256), (100, 576)] + ([(256, 1024), (6144, 4096), (1002, 1536)] if ON_GPU else [])
# Inputs that share a scale, bits of a code, the least and the largest, and what a group has beside the scale.
GROUPED = {
    "q8_0": (32, 8, -127, 127, ""),
    "q6_k": (16, 8, -32, 31, ""),
    "int4 g64": (64, 4, -8, 7, ""),
    "int4 g32": (32, 4, -8, 7, ""),
    "int4 zeros": (32, 4, -8, 7, "zeros"),
    "q4_1": (32, 4, 0, 15, "offsets"),
    "desc_act": (32, 4, -8, 7, "zeros"),
}
KINDS = ["fp8", "fp8 tensor", "fp8 blocks", "int8", "int4", *GROUPED]
HALF = BF16
ROUNDED = 4e-3 if ON_GPU else 1e-2  # the interpreter cuts bfloat16 off where a device rounds
FP8_ERROR = 0.04 if ON_GPU else 0.08


def random_weight(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> QuantizedWeight:
    rng = torch.Generator().manual_seed(seed)
    floats = torch.randn(num_outputs, num_inputs, generator=rng) * 0.05
    if kind in ("fp8", "int8", "int4"):
        return quantise(floats, kind)
    if kind == "fp8 tensor":
        weight = quantise(floats, "fp8")
        return replace(weight, scales=weight.scales[:1], tile=(num_outputs, num_inputs))
    if kind == "fp8 blocks":
        codes = quantise(floats, "fp8").codes
        scales = torch.rand(-(-num_outputs // 128), -(-num_inputs // 128), generator=rng) * 0.01 + 0.001
        return QuantizedWeight(codes, scales, tile=(128, 128))
    size, bits, low, high, beside = GROUPED[kind]
    groups = num_outputs, num_inputs // size
    codes = torch.randint(low, high + 1, (num_outputs, num_inputs), generator=rng).to(torch.int8)
    scales = (torch.rand(groups, generator=rng) * 0.01 + 0.001).half().float()
    weight = QuantizedWeight(codes, scales, tile=(1, size), bits=bits, lowest=low if bits == 4 else -8)
    if beside == "zeros":
        weight = replace(weight, zeros=torch.randint(-8, 8, groups, generator=rng).float())
    if beside == "offsets":
        weight = replace(weight, offsets=torch.randn(groups, generator=rng).half().float() * 0.01)
    if kind == "desc_act":
        order = torch.randperm(num_inputs, generator=rng)
        weight = replace(weight, groups=(torch.arange(num_inputs) // size)[order])
    return weight


def takes_turns(kinds: Iterable[str], *others: list[object]) -> list[tuple[object, ...]]:
    """Each kind with all others on a GPU; in the interpreter each with one of them."""
    kinds = list(kinds)
    return choose(itertools.product(kinds, *others), *zip(kinds, *map(itertools.cycle, others)))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def packed(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[gemm.PackedCodes, torch.Tensor]:
    weight = random_weight(kind, *shape)
    return gemm.pack(weight.to(DEVICE), dtype), weight.dequantise().double().to(DEVICE)


def in_order(x: torch.Tensor, weight: gemm.PackedCodes) -> torch.Tensor:
    return x if weight.order is None else x[:, weight.order]


def random_rows(rows: int, width: int, dtype: torch.dtype = HALF, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(("kind", "shape"), takes_turns(KINDS, SHAPES), ids=str)
def test_dequantised_weights_are_the_formats_own(kind: str, shape: tuple[int, int]) -> None:
    weight, expected = packed(kind, shape, F32)
    assert error(gemm.dequantise(weight, F32), in_order(expected, weight)) < 1e-6
    weight, expected = packed(kind, shape, HALF)
    assert error(gemm.dequantise(weight, HALF), in_order(expected, weight)) < ROUNDED


@pytest.mark.parametrize(
    ("kind", "shape"), takes_turns([kind for kind in KINDS if kind != "desc_act"], SHAPES), ids=str
)
def test_one_row(kind: str, shape: tuple[int, int]) -> None:
    weight, wide = packed(kind, shape, HALF)
    x = random_rows(1, shape[1])
    norm, bias = random_rows(1, shape[1], seed=2)[0], random_rows(1, shape[0], seed=3)[0]
    assert error(one_row(x, weight, None), x.double() @ wide.T) < ROUNDED
    normed = x.double() * torch.rsqrt(x.double().square().mean() + EPS) * norm.double()
    expected = normed @ wide.T + bias.double()
    assert error(one_row(x, weight, bias, norm=norm, eps=EPS), expected) < ROUNDED
    gate, up = expected.chunk(2, 1)
    got = one_row(x, weight, bias, norm=norm, eps=EPS, swiglu=True)
    assert error(got, F.silu(gate) * up) < 2 * ROUNDED
    residual = random_rows(1, shape[0], seed=4)
    expected = residual.double() + x.double() @ wide.T
    assert one_row(x, weight, None, residual=residual) is residual
    assert error(residual, expected) < ROUNDED


ROWS = [1, 3, 16, 40, 64, 130] if ON_GPU else [3, 70, 70, 3]


@pytest.mark.parametrize(("kind", "shape", "rows"), takes_turns(KINDS, SHAPES, ROWS), ids=str)
def test_rows_of_floats(kind: str, shape: tuple[int, int], rows: int) -> None:
    weight, wide = packed(kind, shape, HALF)
    x = random_rows(rows, shape[1])
    ordered = in_order(x, weight)
    bias, residual = random_rows(1, shape[0], seed=3)[0], random_rows(rows, shape[0], seed=4)
    product = x.double() @ wide.T
    assert error(gemm.multiply_floats(ordered, weight, None)[0], product) < ROUNDED
    product += residual.double() + bias.double()
    gemm.multiply_floats(ordered, weight, bias, residual=residual)
    assert error(residual, product) < ROUNDED


@pytest.mark.parametrize(
    ("kind", "shape", "rows"), takes_turns(["fp8", "fp8 tensor", "fp8 blocks", "int8"], SHAPES, ROWS), ids=str
)
def test_rows_of_codes(kind: str, shape: tuple[int, int], rows: int) -> None:
    weight, wide = packed(kind, shape, HALF)
    assert weight.takes_codes
    x = random_rows(rows, shape[1])
    codes, scales = gemm.quantise_rows(x, weight.codes.dtype)
    values = codes.double() * scales.double()[:, None]
    assert error(values, x.double()) < (FP8_ERROR if codes.dtype == FP8 else 0.01)
    bias, residual = random_rows(1, shape[0], seed=3)[0], random_rows(rows, shape[0], seed=4)
    expected = values @ wide.T
    out = torch.full((rows, shape[0]), torch.nan, dtype=HALF, device=DEVICE)
    assert error(gemm.multiply_codes(codes, scales, weight, None, out), expected) < ROUNDED
    expected += residual.double() + bias.double()
    gemm.multiply_codes(codes, scales, weight, bias, residual, residual=residual)
    assert error(residual, expected) < ROUNDED


@pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("width", [576, 1000, 14336 if ON_GPU else 2048])
def test_codes_of_norms_and_gates(dtype: torch.dtype, width: int) -> None:
    bound = FP8_ERROR if dtype == FP8 else 0.03
    residual, delta = random_rows(5, width), random_rows(5, width, seed=2)
    norm = random_rows(1, width, seed=3)[0]
    whole = (residual.float() + delta.float()).to(HALF)
    codes, scales = gemm.quantise_rows(delta, dtype, residual=residual, norm=norm, eps=EPS)
    assert error(residual, whole.double()) < (1e-9 if ON_GPU else ROUNDED)
    wide = residual.double()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * norm.double()
    assert error(codes.double() * scales.double()[:, None], expected) < bound
    again, _ = gemm.quantise_rows(None, dtype, residual=residual, norm=norm, eps=EPS)
    assert torch.equal(again.view(torch.int8), codes.view(torch.int8))
    gate_up = random_rows(5, 2 * width)
    gate, up = gate_up.double().chunk(2, 1)
    codes, scales = gemm.quantise_rows(gate_up, dtype, silu=True)
    assert error(codes.double() * scales.double()[:, None], F.silu(gate) * up) < bound


def test_a_row_of_zeros_has_codes() -> None:
    codes, scales = gemm.quantise_rows(torch.zeros(2, 64, dtype=HALF, device=DEVICE), FP8)
    assert not codes.float().any() and bool(torch.isfinite(scales).all())


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "q4_1", "q6_k"])
def test_rows_do_not_depend_on_each_other(kind: str) -> None:
    weight, _ = packed(kind, (96, 256), HALF)
    x = random_rows(13, 256)
    together, _ = gemm.multiply_floats(x, weight, None)
    alone, _ = gemm.multiply_floats(x[4:5], weight, None)
    assert torch.equal(together[4:5], alone)
