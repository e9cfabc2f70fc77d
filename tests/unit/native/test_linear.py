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
    (2, 17, 96),
    (3, 17, 65),
    (3, 33, 32),
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
INT4_FORMS = {  # (signed, offsets, scales that float16 holds)
    "int4": (True, False, True),
    "int4 with offsets": (True, True, True),
    "uint4": (False, False, True),
    "uint4 with offsets": (False, True, True),
    "int4 with long scales": (True, False, False),
    "uint4 with long scales and offsets": (False, True, False),
}
KINDS = ["int8", "float32", *INT4_FORMS]
FEW_KINDS = ["int8", "float32", "uint4 with offsets"]


def quantised(values: Tensor) -> Tensor:
    """What the kernels take numbers [rows, k] to be: int8 with a scale for each 64 of a row. In float64."""
    rows, k = values.shape
    padded = torch.zeros(rows, -(-k // 64) * 64)
    padded[:, :k] = values
    groups = padded.view(rows, -1, 64)
    largest = groups.abs().amax(-1, keepdim=True)
    # A Python number over a tensor would be computed with a reciprocal, one rounding away from a division.
    factor = torch.where(largest > 1e-30, torch.full_like(largest, 127.0) / largest, 0.0)
    scale = torch.where(largest > 1e-30, largest / 127.0, 0.0)
    return (torch.round(groups * factor).double() * scale.double()).view(rows, -1)[:, :k]


def int4_parts(kind: str, out: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random codes, and a scale and an offset for each 32 of a row."""
    signed, offsets, half = INT4_FORMS[kind]
    lowest = -8 if signed else 0
    codes = torch.randint(lowest, lowest + 16, (out, columns), dtype=torch.int8)
    parts = [torch.randn(out, -(-columns // 32)) * 0.1 for _ in range(2)]
    scales, moved = (part.half().float() for part in parts) if half else parts
    return codes, scales, moved if offsets else None


def int4_values(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    def spread(part: Tensor) -> Tensor:
        return part.double().repeat_interleave(32, 1)[:, : codes.shape[1]]

    values = codes.double() * spread(scales)
    return values if offsets is None else values + spread(offsets)


class Weight:
    """Packed numbers, and in float64 what they stand for."""

    def __init__(self, kind: str, numbers: Tensor | tuple[Tensor, Tensor, Tensor | None], library: NativeLibrary):
        self.kind, self.packed = kind, self._pack(kind, numbers, library)
        if isinstance(numbers, tuple):
            self.values = int4_values(*numbers)
        else:
            self.values = quantised(numbers) if kind == "int8" else numbers.double()

    @staticmethod
    def random(kind: str, out: int, columns: int, library: NativeLibrary) -> Weight:
        numbers = int4_parts(kind, out, columns) if kind in INT4_FORMS else torch.randn(out, columns)
        return Weight(kind, numbers, library)

    @staticmethod
    def _pack(
        kind: str, numbers: Tensor | tuple[Tensor, Tensor, Tensor | None], library: NativeLibrary
    ) -> PackedWeight:
        if isinstance(numbers, tuple):
            return native.pack_int4(*numbers, is_signed=INT4_FORMS[kind][0], library=library)
        return (native.pack_int8 if kind == "int8" else native.pack_float32)(numbers, library)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return PackedLinear(self.packed, bias)(x)

    def expected(self, x: Tensor) -> Tensor:
        return (x.double() if self.kind == "float32" else quantised(x)) @ self.values.T


@pytest.mark.parametrize(("rows", "out", "columns"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_definition(
    library: NativeLibrary, kind: str, rows: int, out: int, columns: int
) -> None:
    x, bias = torch.randn(rows, columns), torch.randn(out)
    weight = Weight.random(kind, out, columns, library)
    size = x.norm(dim=1)[:, None].double() * weight.values.norm(dim=1)[None] + 1e-6
    expected = weight.expected(x)
    assert ((weight.linear(x).double() - expected).abs() / size).max() < 5e-7
    assert ((weight.linear(x, bias).double() - (expected + bias.double())).abs() / (size + bias.abs())).max() < 5e-7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "columns"), [(100, 200), (576, 576), (40, 1536)])
def test_rows_do_not_depend_on_the_batch(library: NativeLibrary, kind: str, out: int, columns: int) -> None:
    x, bias, weight = torch.randn(70, columns), torch.randn(out), Weight.random(kind, out, columns, library)
    single = torch.cat([weight.linear(row[None], bias) for row in x])
    for m in [*range(1, 34), 64, 70]:
        assert torch.equal(weight.linear(x[:m], bias), single[:m]), m


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_large_batches_and_thread_counts_give_the_same_bits(library: NativeLibrary, kind: str) -> None:
    x = torch.randn(300, 320)
    numbers = int4_parts(kind, 200, 320) if kind in INT4_FORMS else torch.randn(200, 320)
    results = []
    for threads in (1, 2, 3):
        library.set_num_threads(threads)
        weight = Weight(kind, numbers, library)
        results.append((weight.linear(x), weight.packed.data))
        assert torch.equal(results[-1][0][:9], weight.linear(x[:9].contiguous()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ["int8", "int4", "uint4"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_extremes_do_not_saturate(library: NativeLibrary, rows: int, kind: str) -> None:
    """All products at their largest, with both signs: careless 16-bit partial sums would overflow."""
    is_high = torch.ones(48, 256, dtype=torch.bool)
    is_high[::2] = False
    is_high[1, ::2] = False
    if kind == "int8":
        weight = Weight(kind, torch.where(is_high, 1.0, -1.0), library)
    else:
        low, high = (-8, 7) if kind == "int4" else (0, 15)
        weight = Weight(kind, (torch.where(is_high, high, low).to(torch.int8), torch.ones(48, 8), None), library)
    for x in (torch.ones(rows, 256), -torch.ones(rows, 256)):
        torch.testing.assert_close(weight.linear(x), x @ weight.values.float().T, rtol=1e-5, atol=1e-3)


def test_zero_rows_columns_and_groups(library: NativeLibrary) -> None:
    x, numbers = torch.randn(9, 192), torch.randn(40, 192)
    x[2] = 0
    x[3, 64:128] = 0
    numbers[7] = 0
    numbers[8, :64] = 1e-38
    codes, scales, offsets = int4_parts("uint4 with offsets", 40, 192)
    assert offsets is not None
    scales[7], offsets[7] = 0, 0
    scales[8, :2] = 2.0**-24  # the smallest float16
    for weight in (Weight("int8", numbers, library), Weight("uint4 with offsets", (codes, scales, offsets), library)):
        result = weight.linear(x)
        assert torch.all(result[2] == 0) and torch.all(result[:, 7] == 0)
        torch.testing.assert_close(result.double(), weight.expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_what_is_no_number_shows_in_its_row_and_nowhere_else(library: NativeLibrary, kind: str, value: float) -> None:
    for rows, out, columns in ((1, 16, 64), (7, 100, 200), (13, 33, 640)):
        x, weight = torch.randn(rows, columns), Weight.random(kind, out, columns, library)
        clean = weight.linear(x)
        for column in (0, columns // 2, columns - 1):
            row = column % rows
            broken = x.clone()
            broken[row, column] = value
            result = weight.linear(broken)
            assert not torch.isfinite(result[row]).any()
            others = [other for other in range(rows) if other != row]
            assert torch.equal(result[others], clean[others])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_shows_in_its_output(library: NativeLibrary, value: float) -> None:
    x, numbers = torch.randn(5, 130), torch.randn(40, 130)
    numbers[17, 129] = value
    is_finite = torch.isfinite(Weight("int8", numbers, library).linear(x))
    assert not is_finite[:, 17].any() and is_finite[:, :17].all() and is_finite[:, 18:].all()


def test_int8_is_close_to_float(fast: NativeLibrary) -> None:
    x, numbers = torch.randn(32, 576), torch.randn(960, 576)
    exact = x.double() @ numbers.double().T
    error = (Weight("int8", numbers, fast).linear(x).double() - exact).norm() / exact.norm()
    assert error < 0.012


def test_float32_sums_in_input_order(generic: NativeLibrary) -> None:
    """The portable build has no fused multiply-add, so the chain can be written down exactly."""
    x, numbers = torch.randn(3, 1100), torch.randn(20, 1100)
    chain = torch.zeros(3, 20)
    for k in range(1100):
        chain = chain + x[:, k, None] * numbers[None, :, k]
    assert torch.equal(Weight("float32", numbers, generic).linear(x), chain)


def test_layers_pack_their_weights(fast: NativeLibrary) -> None:
    x, numbers, bias = torch.randn(6, 130), torch.randn(50, 130), torch.randn(50)
    for layer, kind in ((Int8Linear(numbers, bias), "int8"), (Float32Linear(numbers, bias), "float32")):
        assert (layer.in_features, layer.out_features) == (130, 50)
        assert torch.equal(layer(x), Weight(kind, numbers, fast).linear(x, bias))
    assert Int8Linear(numbers).num_bytes == 4 * 3 * 1088
    assert Float32Linear(numbers, bias).num_bytes == 64 * 130 * 4 + 200
    assert Int8Linear(numbers.double()).out_features == 50
    assert Int8Linear(numbers)(x[:0]).shape == (0, 50)


def test_scales_of_int4_take_two_bytes_where_that_is_exact(fast: NativeLibrary) -> None:
    codes, scales, offsets = int4_parts("uint4 with offsets", 32, 128)
    records = 2 * 2
    assert len(native.pack_int4(codes, scales, offsets, is_signed=False).data) == 64 + records * (512 + 128)
    assert len(native.pack_int4(codes - 8, scales, is_signed=True).data) == 64 + records * (512 + 64)
    assert len(native.pack_int4(codes, scales * 1.001, offsets, is_signed=False).data) == 64 + records * (512 + 256)


def test_wrong_inputs_are_refused(fast: NativeLibrary) -> None:
    layer = Int8Linear(torch.randn(8, 64))
    for bad in (torch.randn(2, 63), torch.randn(2, 64).half(), torch.randn(64, 2).T):
        with pytest.raises(ValueError):
            layer(bad)
    with pytest.raises(ValueError, match="bias"):
        Weight.random("int8", 8, 64, fast).linear(torch.randn(2, 64), torch.randn(7))
    codes, scales, _ = int4_parts("int4", 8, 64)
    for parts in ((codes.float(), scales), (codes, scales.half()), (codes, scales[:, :1]), (codes[:4], scales)):
        with pytest.raises(ValueError):
            native.pack_int4(*parts, is_signed=True)
