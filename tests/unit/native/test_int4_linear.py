"""The kernels of 4-bit weights: what codes, scales and offsets say, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway import native
from headway.layers.native_ops import PackedLinear
from headway.native.lib import NativeLibrary, PackedWeight

SHAPES = [  # (rows, out, in)
    (1, 16, 64),
    (1, 576, 576),
    (2, 17, 96),
    (3, 33, 32),
    (4, 100, 200),
    (5, 31, 130),
    (6, 1, 1),
    (7, 48, 63),
    (9, 576, 1536),
    (70, 80, 576),
    (130, 47, 100),
]
FORMS = [  # (signed, offsets, scales that float16 holds)
    (True, False, True),
    (True, True, True),
    (False, True, True),
    (False, False, True),
    (True, False, False),
    (False, True, False),
]


def random_weight(
    out: int, columns: int, *, signed: bool, offsets: bool, half: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    lowest = -8 if signed else 0
    codes = torch.randint(lowest, lowest + 16, (out, columns), dtype=torch.int8)
    parts = [torch.randn(out, -(-columns // 32)) * 0.1 for _ in range(2)]
    scales, moved = (part.half().float() for part in parts) if half else parts
    return codes, scales, moved if offsets else None


def pack(weight: tuple[Tensor, Tensor, Tensor | None], signed: bool, library: NativeLibrary) -> PackedWeight:
    return native.pack_int4(*weight, is_signed=signed, library=library)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return PackedLinear(packed, bias)(x)


def floats(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    def spread(part: Tensor) -> Tensor:
        return part.double().repeat_interleave(32, 1)[:, : codes.shape[1]]

    values = codes.double() * spread(scales)
    return values if offsets is None else values + spread(offsets)


def quantised(x: Tensor) -> Tensor:
    """What the kernels take x to be: int8 with a scale for each 64 inputs."""
    rows, k = x.shape
    padded = torch.zeros(rows, -(-k // 64) * 64)
    padded[:, :k] = x
    groups = padded.view(rows, -1, 64)
    largest = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 1e-30, torch.full_like(largest, 127.0) / largest, 0.0)
    scale = torch.where(largest > 1e-30, largest / 127.0, 0.0)
    return (torch.round(groups * factor).double() * scale.double()).view(rows, -1)[:, :k]


@pytest.mark.parametrize(("rows", "out", "columns"), SHAPES)
@pytest.mark.parametrize(("signed", "offsets", "half"), FORMS)
def test_values_are_those_of_the_weight_as_it_is(
    library: NativeLibrary, rows: int, out: int, columns: int, signed: bool, offsets: bool, half: bool
) -> None:
    x, bias = torch.randn(rows, columns), torch.randn(out)
    weight = random_weight(out, columns, signed=signed, offsets=offsets, half=half)
    exact = floats(*weight)
    expected = quantised(x) @ exact.T + bias.double()
    result = linear(x, pack(weight, signed, library), bias)
    scale = x.norm(dim=1)[:, None].double() * exact.norm(dim=1)[None] + 1.0
    assert ((result.double() - expected).abs() / scale).max() < 5e-7


@pytest.mark.parametrize(("signed", "offsets", "half"), FORMS)
@pytest.mark.parametrize(("out", "columns"), [(100, 200), (40, 1536)])
def test_rows_do_not_depend_on_the_batch(
    library: NativeLibrary, out: int, columns: int, signed: bool, offsets: bool, half: bool
) -> None:
    x, bias = torch.randn(70, columns), torch.randn(out)
    packed = pack(random_weight(out, columns, signed=signed, offsets=offsets, half=half), signed, library)
    single = torch.cat([linear(row[None], packed, bias) for row in x])
    for m in [*range(1, 20), 33, 64, 70]:
        assert torch.equal(linear(x[:m], packed, bias), single[:m]), m


def test_large_batches_and_thread_counts_give_the_same_bits(library: NativeLibrary) -> None:
    x = torch.randn(300, 320)
    weight = random_weight(200, 320, signed=False, offsets=True, half=True)
    results = []
    for threads in (1, 2, 3):
        library.set_num_threads(threads)
        packed = pack(weight, False, library)
        results.append((linear(x, packed), packed.data))
        assert torch.equal(results[-1][0][:9], linear(x[:9].contiguous(), packed))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_extremes_do_not_saturate(library: NativeLibrary, rows: int, signed: bool) -> None:
    """All products at their largest, with both signs: careless 16-bit partial sums would overflow."""
    lowest = -8 if signed else 0
    codes = torch.full((48, 256), lowest + 15, dtype=torch.int8)
    codes[::2] = lowest
    codes[1, ::2] = lowest
    weight = (codes, torch.ones(48, 8), None)
    for x in (torch.ones(rows, 256), -torch.ones(rows, 256)):
        result = linear(x, pack(weight, signed, library))
        torch.testing.assert_close(result, x @ codes.float().T, rtol=1e-5, atol=1e-3)


def test_zero_rows_and_groups(library: NativeLibrary) -> None:
    x = torch.randn(9, 192)
    x[2] = 0
    x[3, 64:128] = 0
    codes, scales, offsets = random_weight(40, 192, signed=False, offsets=True, half=True)
    assert offsets is not None
    scales[7], offsets[7] = 0, 0
    scales[8, :2] = 2.0**-24  # the smallest float16
    result = linear(x, pack((codes, scales, offsets), False, library))
    assert torch.all(result[2] == 0) and torch.all(result[:, 7] == 0)
    torch.testing.assert_close(result.double(), quantised(x) @ floats(codes, scales, offsets).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_shows_in_its_row_and_nowhere_else(library: NativeLibrary, value: float) -> None:
    for rows, out, columns in ((1, 16, 64), (7, 100, 200), (13, 33, 640)):
        packed = pack(random_weight(out, columns, signed=False, offsets=True, half=True), False, library)
        x = torch.randn(rows, columns)
        clean = linear(x, packed)
        for column in (0, columns // 2, columns - 1):
            row = column % rows
            broken = x.clone()
            broken[row, column] = value
            result = linear(broken, packed)
            assert not torch.isfinite(result[row]).any()
            others = [other for other in range(rows) if other != row]
            assert torch.equal(result[others], clean[others])


def test_portable_build_agrees(fast: NativeLibrary, generic: NativeLibrary) -> None:
    x, weight = torch.randn(9, 576), random_weight(96, 576, signed=False, offsets=True, half=False)
    torch.testing.assert_close(
        *(linear(x, pack(weight, False, each)) for each in (fast, generic)), rtol=1e-4, atol=1e-4
    )


def test_scales_take_two_bytes_where_that_is_exact(fast: NativeLibrary) -> None:
    codes, scales, offsets = random_weight(32, 128, signed=False, offsets=True, half=True)
    records = 2 * 2
    assert len(native.pack_int4(codes, scales, offsets, is_signed=False).data) == 64 + records * (512 + 128)
    assert len(native.pack_int4(codes - 8, scales, is_signed=True).data) == 64 + records * (512 + 64)
    assert len(native.pack_int4(codes, scales * 1.001, offsets, is_signed=False).data) == 64 + records * (512 + 256)


def test_wrong_parts_are_refused(fast: NativeLibrary) -> None:
    codes, scales, _ = random_weight(8, 64, signed=True, offsets=False, half=True)
    for bad in ((codes.float(), scales), (codes, scales.half()), (codes, scales[:, :1]), (codes[:4], scales)):
        with pytest.raises(ValueError):
            native.pack_int4(*bad, is_signed=True)
