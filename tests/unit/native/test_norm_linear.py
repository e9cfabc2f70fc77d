"""A norm and the layer behind it in one call: the bits of the steps one by one."""

from __future__ import annotations

import pytest
import torch

from headway.layers.linear import Norm
from headway.layers.native_ops import Float32Linear, Int4Linear, Int8Linear, NativeOps, PackedLinear
from headway.layers.quantized_weight import QuantizedWeight, quantise
from headway.native.lib import NativeLibrary


def refused(*_: object) -> torch.Tensor:
    raise AssertionError("the steps are not taken one by one")


def layers() -> list[PackedLinear]:
    weight, bias = torch.randn(48, 96), torch.randn(48)
    return [Int8Linear(weight, bias), Int4Linear(quantise(weight, "int4")), Float32Linear(weight)]


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("with_delta", [False, True])
def test_fused_forms_are_the_steps(fast: NativeLibrary, rows: int, with_delta: bool) -> None:
    ops, norm = NativeOps(), torch.rand(96)
    for layer in layers():
        residual, delta = torch.randn(rows, 96), torch.randn(rows, 96) if with_delta else None
        residuals = [residual.clone() for _ in range(3)]
        product = layer(ops.norm(residuals[0], delta, norm, 1e-5))
        fused = layer.after_norm(Norm(norm, 1e-5, refused))(residuals[1], delta)
        gated = layer.after_norm(Norm(norm, 1e-5, refused), refused)(residuals[2], delta)
        assert torch.equal(fused, product) and torch.equal(gated, ops.silu_mul(product))
        assert torch.equal(residuals[0], residuals[1]) and torch.equal(residuals[0], residuals[2])


def test_inputs_that_are_put_in_order_take_the_steps(fast: NativeLibrary) -> None:
    codes = torch.randint(-8, 8, (16, 64), dtype=torch.int8)
    groups = torch.arange(64).flip(0) // 32
    layer = Int4Linear(QuantizedWeight(codes, torch.rand(16, 2), groups=groups, tile=(1, 32), bits=4))
    residual, norm = torch.randn(2, 64), Norm(torch.rand(64), 1e-5, NativeOps().norm)
    assert torch.equal(layer.after_norm(norm)(residual, None), layer(norm(residual, None)))
    assert layer.whole_mlp(Int8Linear(torch.randn(128, 96)), norm) is None


def test_wrong_inputs_are_refused(fast: NativeLibrary) -> None:
    layer, norm = Int8Linear(torch.randn(8, 64)), torch.rand(64)
    for residual, delta, weight in (
        (torch.randn(2, 63), None, norm),
        (torch.randn(2, 64), torch.randn(3, 64), norm),
        (torch.randn(2, 64), None, torch.rand(32)),
        (torch.randn(2, 64), torch.randn(2, 64).half(), norm),
    ):
        with pytest.raises(ValueError):
            layer.after_norm(Norm(weight, 1e-5, refused))(residual, delta)


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_an_mlp_is_its_steps(fast: NativeLibrary, rows: int) -> None:
    norm = torch.rand(96)
    up, back = torch.randn(128, 96), torch.randn(96, 64)
    for gate_up, down in (
        (Int8Linear(up, torch.randn(128)), Int8Linear(back)),
        (Int4Linear(quantise(up, "int4")), Int8Linear(back, torch.randn(96))),
        (Float32Linear(up), Float32Linear(back)),
    ):
        residual, delta = torch.randn(rows, 96), torch.randn(rows, 96)
        residuals = [residual.clone(), residual.clone()]
        activated = gate_up.after_norm(Norm(norm, 1e-5, refused), refused)(residuals[0], delta)
        whole = down.whole_mlp(gate_up, Norm(norm, 1e-5, refused))
        assert whole is not None and torch.equal(whole(residuals[1], delta), down(activated))
        assert torch.equal(residuals[0], residuals[1])
    with pytest.raises(ValueError, match="128 gates and values for a layer of 96 inputs"):
        Int8Linear(torch.randn(8, 96)).whole_mlp(Int8Linear(up), Norm(norm, 1e-5, refused))
