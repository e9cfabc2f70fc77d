"""Which packed layer a weight becomes on the CPU, and that 4-bit weights are taken as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway import native
from headway.layers import LinearFactory
from headway.layers.linear import Linear
from headway.layers.native_ops import Float32Linear, Int4Linear, Int8Linear
from headway.layers.quantized_weight import QuantizedWeight, dequantised, quantise

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the CPU kernels cannot be built")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def four_bits(
    outputs: int, inputs: int, tile: tuple[int, int], *, lowest: int = -8, **parts: Tensor
) -> QuantizedWeight:
    shape = -(-outputs // tile[0]), -(-inputs // tile[1])
    codes = torch.randint(lowest, lowest + 16, (outputs, inputs), dtype=torch.int8)
    return QuantizedWeight(codes, torch.randn(shape) * 0.1, tile=tile, bits=4, lowest=lowest, **parts)


def error(layer: Linear, weight: Tensor) -> float:
    x = torch.randn(9, weight.shape[1])
    exact = x.double() @ weight.double().T
    return float((layer(x).double() - exact).norm() / exact.norm())


def factory(quantization: str) -> LinearFactory:
    return LinearFactory(quantization, keeps_stored=True, kernels="native", device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    "weight",
    [
        four_bits(40, 96, (1, 32), lowest=0, offsets=torch.randn(40, 3)),
        four_bits(48, 576, (1, 64)),
        four_bits(17, 256, (1, 128), lowest=0, zeros=torch.full((17, 2), 8.0)),
        four_bits(32, 192, (1, 96)),
        four_bits(32, 100, (1, 100)),
        four_bits(32, 256, (16, 128)),
        four_bits(24, 256, (1, 64), groups=torch.arange(256).flip(0) // 64),
        four_bits(24, 128, (1, 32), groups=torch.randperm(128) // 32),
    ],
)
def test_only_activations_are_rounded(weight: QuantizedWeight) -> None:
    bias = torch.randn(weight.shape[0])
    layer = factory("int8").linear(weight, bias)
    assert isinstance(layer, Int4Linear)
    assert error(Int4Linear(weight), weight.dequantise()) < 0.012
    x = torch.randn(3, weight.shape[1])
    torch.testing.assert_close(layer(x), Int4Linear(weight)(x) + bias)


@pytest.mark.parametrize(
    "weight",
    [
        four_bits(32, 96, (1, 48)),
        four_bits(24, 128, (1, 32), groups=torch.zeros(128, dtype=torch.int64)),
        quantise(torch.randn(40, 130), "int8"),
        quantise(torch.randn(40, 130), "fp8"),
    ],
)
def test_other_codes_become_int8_or_floats(weight: QuantizedWeight) -> None:
    layer = factory("int8").linear(weight, None)
    assert isinstance(layer, Int8Linear)
    assert error(layer, weight.dequantise()) < 0.012
    layer = factory("none").linear(weight, None)
    assert isinstance(layer, Float32Linear)
    assert error(layer, weight.dequantise()) < 1e-6


def test_float_weights_become_what_was_asked_for() -> None:
    weight = torch.randn(48, 192)
    layers = {name: factory(name).linear(weight, None) for name in ("none", "int8", "int4")}
    heads = [type(factory(name).head(weight)) for name in ("none", "int8", "int4")]
    assert heads == [Float32Linear, Int8Linear, Int8Linear]
    assert [type(layer) for layer in layers.values()] == [Float32Linear, Int8Linear, Int4Linear]
    errors = [error(layer, weight) for layer in layers.values()]
    assert errors[0] < 1e-6 and errors[1] < 0.012 and 0.02 < errors[2] < 0.12
    assert layers["int4"].num_bytes < 0.62 * layers["int8"].num_bytes


def test_a_large_weight_is_packed_in_blocks_of_rows() -> None:
    weight = torch.randn(9000, 64)
    stored = quantise(weight, "int8")
    x = torch.randn(2, 64)
    assert torch.equal(Int8Linear(stored)(x), Int8Linear(stored.dequantise())(x))
    assert torch.equal(Int8Linear(weight).tensors[0], native.pack_int8(weight).data)


@pytest.mark.parametrize("tile", [(1, 32), (8, 32), (1, 100)], ids=str)
@pytest.mark.parametrize("part", [range(64), range(64, 100), range(48), range(52, 100)], ids=str)
def test_some_inputs_of_a_weight_stand_for_the_same_numbers(tile: tuple[int, int], part: range) -> None:
    weight = four_bits(16, 100, tile)
    assert torch.equal(dequantised(weight.columns(part)), weight.dequantise()[:, part.start : part.stop])
