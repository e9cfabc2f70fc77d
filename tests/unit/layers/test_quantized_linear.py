"""`QuantizedLinear` in a layer: whichever way rows take, the sums are those of the float weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.triton_device import DEVICE, ON_GPU, choose  # isort: split

from headway.layers import LinearFactory, quantized_weight
from headway.layers.linear import Linear, Norm, TorchLinear
from headway.layers.ops import DenseMlp, Ops, TorchOps
from headway.layers.quantized_linear import QuantizedLinear
from headway.layers.quantized_weight import QuantizedWeight, quantise, stacked
from headway.layers.triton_ops import TritonLinear, TritonOps
from tests.unit.layers.test_quantized_gemm import random_rows, random_weight

F32, BF16 = torch.float32, torch.bfloat16
HIDDEN, INNER, EPS = 128, 256 if ON_GPU else 128, 1e-5
SHAPES = [(HIDDEN + 64, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
# Of activations in 8 bits, over four products; the interpreter cuts numbers off where a device rounds them.
FP8_ERROR = 0.1 if ON_GPU else 0.25
LARGEST_ERROR = {"fp8": FP8_ERROR, "fp8 blocks": FP8_ERROR, "int8": 0.05}
KINDS = ["fp8", "fp8 blocks", "int8", "int4", "q4_1", "q6_k", "desc_act"]
ROWS = [1, 5, 40, 70, 300] if ON_GPU else [1, 18]


def step(ops: Ops, linears: list[Linear], norms: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Projection, its sum, the MLP and the next layer's projection: all ways that a residual takes."""
    qkv, o, gate_up, down = linears
    residual = x.clone()
    before, behind = (Norm(weight, EPS, ops.norm) for weight in norms)
    project = qkv.after_norm(before)
    first = project(residual, None)
    delta = o.into_residual(norms[1])(residual, first[:, :HIDDEN].contiguous())
    delta = DenseMlp(gate_up, down).into_residual(behind, ops.silu_mul, norms[0])(residual, delta)
    second = project(residual, delta)
    return [first, second, residual]


@pytest.mark.parametrize(("kind", "rows"), list(itertools.product(KINDS, ROWS)))
def test_a_layers_sums(kind: str, rows: int) -> None:
    weights = [random_weight(kind, *shape, seed=place) for place, shape in enumerate(SHAPES)]
    has_bias = rows % 2 == 0
    biases = [random_rows(1, shape[0], seed=place)[0] if has_bias else None for place, shape in enumerate(SHAPES)]
    norms = [random_rows(1, HIDDEN, seed=place)[0].abs() + 0.5 for place in (7, 8)]
    x = random_rows(rows, HIDDEN)
    own: list[Linear] = [
        QuantizedLinear(weight.to(DEVICE), bias, dtype=BF16) for weight, bias in zip(weights, biases, strict=True)
    ]
    exact: list[Linear] = [
        TorchLinear(weight.dequantise().to(DEVICE), None if bias is None else bias.float())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    expected = step(TorchOps(), exact, [norm.float() for norm in norms], x.float())
    for got, wanted in zip(step(TritonOps(), own, norms, x), expected, strict=True):
        assert float((got.float() - wanted).norm() / wanted.norm()) < LARGEST_ERROR.get(kind, 0.03)


@pytest.mark.parametrize(
    ("kind", "rows"), choose(itertools.product(["int8", "int4"], [9, 20]), ("int8", 20), ("int4", 9))
)
def test_beside_layers_that_are_not_quantised(kind: str, rows: int) -> None:
    """Which leave half a norm to the next layer too, and take it."""
    weights = [random_weight(kind, *shape, seed=place) for place, shape in enumerate(SHAPES)]
    floats = [weight.dequantise().to(DEVICE, BF16) for weight in weights]
    codes = [QuantizedLinear(weight.to(DEVICE), None, dtype=BF16) for weight in weights]
    norms = [torch.ones(HIDDEN, dtype=BF16, device=DEVICE)] * 2
    x = random_rows(rows, HIDDEN)
    expected = step(
        TorchOps(), [TorchLinear(one.float()) for one in floats], [norm.float() for norm in norms], x.float()
    )
    for are_floats in ((False, True, False, False), (True, False, True, False), (False, True, False, True)):
        mixed: list[Linear] = [
            TritonLinear(own) if is_float else coded
            for is_float, own, coded in zip(are_floats, floats, codes, strict=True)
        ]
        for got, wanted in zip(step(TritonOps(), mixed, norms, x), expected, strict=True):
            assert float((got.float() - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("kind", ["fp8", "int4", "q6_k", "desc_act"])
def test_float32_is_exact(kind: str) -> None:
    weight = random_weight(kind, 96, 256)
    x = random_rows(5, 256, F32)
    product = QuantizedLinear(weight.to(DEVICE), None, dtype=F32)(x)
    assert torch.allclose(product, x @ weight.dequantise().to(DEVICE).T, rtol=1e-4, atol=1e-4)


def test_a_large_weight_is_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(30, 128)
    for name in ("fp8", "int8", "int4"):
        whole = quantise(weight, name)
        with monkeypatch.context() as patch:
            patch.setattr(quantized_weight, "_MAX_AT_ONCE", 1000)
            parts = quantise(weight, name)
        assert torch.equal(parts.dequantise(), whole.dequantise()) and parts.bits == whole.bits


def test_the_factory_quantises_layers_and_leaves_the_output() -> None:
    weight = torch.randn(64, 128, device=DEVICE)
    for name in ("fp8", "int8", "int4"):
        factory = LinearFactory(name, kernels="triton", device=DEVICE, dtype=BF16)
        made = factory.linear(weight, None)
        assert isinstance(made, QuantizedLinear) and made.num_bytes < 0.6 * weight.numel() * 2
        assert not isinstance(factory.head(weight), QuantizedLinear)
        assert isinstance(factory.head(quantise(weight, name)), QuantizedLinear)


def test_formats_side_by_side() -> None:
    """q and k of 4 bits beside v of 8 bits (Q4_K_M), and beside floats."""
    four, eight = random_weight("q4_1", 32, 256), random_weight("q6_k", 16, 256)
    both = stacked([four, eight, four])
    assert isinstance(both, QuantizedWeight) and both.bits == 8 and both.tile == (1, 16)
    wide = torch.cat([four.dequantise(), eight.dequantise(), four.dequantise()])
    assert torch.allclose(both.dequantise(), wide, atol=1e-6)
    same = stacked([four, four])
    assert isinstance(same, QuantizedWeight) and same.bits == 4
    assert isinstance(stacked([four, torch.zeros(8, 256)]), torch.Tensor)
    assert isinstance(stacked([random_weight("fp8", 32, 256), eight]), torch.Tensor)
    shuffled = [random_weight("desc_act", 32, 256, seed=seed) for seed in (1, 2)]
    assert isinstance(stacked(shuffled), torch.Tensor)
