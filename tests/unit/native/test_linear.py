"""Linear kernels: right values on odd shapes, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway import native
from headway.layers.native_ops import Float32Linear, Int8Linear, PackedLinear
from headway.native.lib import NativeLibrary, PackedWeight

SHAPES = [  # (rows, out, in)
    (1, 16, 64),
    (1, 576, 576),
    (2, 960, 576),
    (3, 17, 65),
    (4, 31, 130),
    (5, 1, 1),
    (6, 48, 63),
    (7, 100, 200),
    (8, 576, 1536),
    (13, 33, 640),
    (70, 80, 576),
    (130, 47, 100),
    (200, 160, 64),
]


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, k] -> int8 values as float64 [rows, groups, 64] and scales [rows, groups], as the kernels define them."""
    rows, k = values.shape
    padded = torch.zeros(rows, -(-k // 64) * 64)
    padded[:, :k] = values
    groups = padded.view(rows, -1, 64)
    largest = groups.abs().amax(-1)
    # A Python number over a tensor would be computed with a reciprocal, one rounding away from a division.
    factor = torch.where(largest > 1e-30, torch.full_like(largest, 127.0) / largest, 0.0)
    scale = torch.where(largest > 1e-30, largest / 127.0, 0.0)
    return torch.round(groups * factor[..., None]).double(), scale.double()


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return PackedLinear(packed, bias)(x)


def int8_reference(x: Tensor, weight: Tensor) -> Tensor:
    (xq, xs), (wq, ws) = quantise(x), quantise(weight)
    return torch.einsum("mgk,ngk,mg,ng->mn", xq, wq, xs, ws)


@pytest.mark.parametrize(("rows", "out", "columns"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_linear_equals_the_definition(
    library: NativeLibrary, rows: int, out: int, columns: int, with_bias: bool
) -> None:
    x, weight = torch.randn(rows, columns), torch.randn(out, columns) * 0.1
    bias = torch.randn(out) if with_bias else None
    result = linear(x, native.pack_int8(weight, library), bias)
    expected = int8_reference(x, weight) + (0 if bias is None else bias.double())
    scale = (x.norm(dim=1)[:, None] * weight.norm(dim=1)[None]).double() + 1e-6
    assert ((result.double() - expected).abs() / scale).max() < 2e-6


def test_int8_linear_is_close_to_float(fast: NativeLibrary) -> None:
    x, weight = torch.randn(32, 576), torch.randn(960, 576)
    exact = x.double() @ weight.double().T
    error = (linear(x, native.pack_int8(weight)).double() - exact).norm() / exact.norm()
    assert error < 0.012


def test_int8_extremes_do_not_saturate(library: NativeLibrary) -> None:
    """All products at their largest, with both signs: careless 16-bit partial sums would overflow."""
    weight = torch.ones(32, 128)
    weight[::2] = -1
    weight[1, ::2] = -1
    for x in (torch.ones(6, 128), -torch.ones(6, 128)):
        result = linear(x, native.pack_int8(weight, library))
        torch.testing.assert_close(result, x @ weight.T, rtol=1e-5, atol=1e-3)


def test_int8_zero_rows_columns_and_groups(library: NativeLibrary) -> None:
    x, weight = torch.randn(5, 192), torch.randn(40, 192)
    x[2] = 0
    x[3, 64:128] = 0
    weight[7] = 0
    weight[8, :64] = 1e-38
    result = linear(x, native.pack_int8(weight, library))
    assert torch.all(result[2] == 0) and torch.all(result[:, 7] == 0)
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result.double(), int8_reference(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "out", "columns"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_float32_linear(library: NativeLibrary, rows: int, out: int, columns: int, with_bias: bool) -> None:
    x, weight = torch.randn(rows, columns), torch.randn(out, columns)
    bias = torch.randn(out) if with_bias else None
    result = linear(x, native.pack_float32(weight, library), bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = (x.norm(dim=1)[:, None] * weight.norm(dim=1)[None]).double() + 1e-6
    assert ((result.double() - expected).abs() / scale).max() < 2e-6


def test_float32_linear_sums_in_input_order(generic: NativeLibrary) -> None:
    """The portable build has no fused multiply-add, so the chain can be written down exactly."""
    x, weight = torch.randn(3, 1100), torch.randn(20, 1100)
    chain = torch.zeros(3, 20)
    for k in range(1100):
        chain = chain + x[:, k, None] * weight[None, :, k]
    assert torch.equal(linear(x, native.pack_float32(weight, generic)), chain)


@pytest.mark.parametrize("kind", ["int8", "float32"])
@pytest.mark.parametrize(("out", "columns"), [(100, 200), (576, 576), (40, 1536)])
def test_rows_do_not_depend_on_the_batch(library: NativeLibrary, kind: str, out: int, columns: int) -> None:
    x, weight, bias = torch.randn(70, columns), torch.randn(out, columns), torch.randn(out)
    if kind == "int8":
        packed = native.pack_int8(weight, library)
        single = torch.cat([linear(row[None], packed, bias) for row in x])
        for m in range(1, 71):
            assert torch.equal(linear(x[:m], packed, bias), single[:m]), m
    else:
        packed_float = native.pack_float32(weight, library)
        single = torch.cat([linear(row[None], packed_float, bias) for row in x])
        for m in range(1, 71):
            assert torch.equal(linear(x[:m], packed_float, bias), single[:m]), m


def test_large_batches_and_thread_counts_give_the_same_bits(library: NativeLibrary) -> None:
    x, weight = torch.randn(300, 320), torch.randn(200, 320)
    results = []
    for threads in (1, 2, 3):
        library.set_num_threads(threads)
        packed, packed_float = native.pack_int8(weight, library), native.pack_float32(weight, library)
        results.append((linear(x, packed), linear(x, packed_float), packed.data))
        assert torch.equal(results[-1][0][:9], linear(x[:9].contiguous(), packed))
        assert torch.equal(results[-1][1][:9], linear(x[:9].contiguous(), packed_float))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_portable_build_agrees(fast: NativeLibrary, generic: NativeLibrary) -> None:
    x, weight = torch.randn(9, 576), torch.randn(96, 576)
    int8 = [linear(x, native.pack_int8(weight, library)) for library in (fast, generic)]
    exact = [linear(x, native.pack_float32(weight, library)) for library in (fast, generic)]
    torch.testing.assert_close(*int8, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*exact, rtol=1e-4, atol=1e-4)


def test_layers_pack_their_weights(fast: NativeLibrary) -> None:
    x, weight, bias = torch.randn(6, 130), torch.randn(50, 130), torch.randn(50)
    for layer, direct in (
        (Int8Linear(weight, bias), linear(x, native.pack_int8(weight), bias)),
        (Float32Linear(weight, bias), linear(x, native.pack_float32(weight), bias)),
    ):
        assert (layer.in_features, layer.out_features) == (130, 50)
        assert torch.equal(layer(x), direct)
    assert Int8Linear(weight).num_bytes == 4 * 3 * 1088
    assert Float32Linear(weight, bias).num_bytes == 64 * 130 * 4 + 200
    assert Int8Linear(weight.double()).out_features == 50
    assert Int8Linear(weight)(x[:0]).shape == (0, 50)


def test_wrong_inputs_are_refused(fast: NativeLibrary) -> None:
    layer, packed = Int8Linear(torch.randn(8, 64)), native.pack_int8(torch.randn(8, 64))
    for bad in (torch.randn(2, 63), torch.randn(2, 64).half(), torch.randn(64, 2).T):
        with pytest.raises(ValueError):
            layer(bad)
    with pytest.raises(ValueError, match="bias"):
        linear(torch.randn(2, 64), packed, torch.randn(7))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("pack", [native.pack_int8, native.pack_float32])
def test_what_is_no_number_shows_in_its_row_and_nowhere_else(library: NativeLibrary, pack, value: float) -> None:
    for rows, out, columns in ((1, 16, 64), (7, 100, 200), (13, 33, 640)):
        x, weight = torch.randn(rows, columns), torch.randn(out, columns)
        clean = linear(x, pack(weight, library))
        for column in (0, columns // 2, columns - 1):
            row = column % rows
            broken = x.clone()
            broken[row, column] = value
            result = linear(broken, pack(weight, library))
            assert not torch.isfinite(result[row]).any()
            others = [other for other in range(rows) if other != row]
            assert torch.equal(result[others], clean[others])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_shows_in_its_output(library: NativeLibrary, value: float) -> None:
    x, weight = torch.randn(5, 130), torch.randn(40, 130)
    weight[17, 129] = value
    is_finite = torch.isfinite(linear(x, native.pack_int8(weight, library)))
    assert not is_finite[:, 17].any() and is_finite[:, :17].all() and is_finite[:, 18:].all()
