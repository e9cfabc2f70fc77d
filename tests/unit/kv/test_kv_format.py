"""Formats of the KV cache in torch: what is stored, what comes back, and what it takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.kv.codes import decode, encode, stored_dtype
from headway.kv.layer_cache import LayerKVCache
from headway.kv_formats import FORMATS, KVFormat, Numbers

NUMBERS = {"fp8": FORMATS["fp8"].keys, "int8": FORMATS["int8"].keys, "int4": FORMATS["int4"].values}
SMALL_KEYS = KVFormat("4-bit keys", FORMATS["int4"].values, FORMATS["int8"].values)
"""The cache takes any format, also one that is nobody's option."""

by_name = pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())


def there_and_back(numbers: Numbers, x: Tensor) -> Tensor:
    return decode(numbers, *encode(numbers, x), torch.float64)


@by_name
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_numbers_come_back_within_half_a_step(numbers: Numbers, magnitude: float) -> None:
    torch.manual_seed(0)
    x = magnitude * torch.randn(50, 3, 64)
    stored, scale = encode(numbers, x)
    assert scale is not None and numbers.largest is not None
    assert stored.dtype == stored_dtype(numbers) and stored.shape == (50, 3, 64 // numbers.dims_per_element)
    largest = x.abs().amax(-1, keepdim=True).double()
    step = 1.001 * largest / numbers.largest  # a float16 scale is off by up to 2^-11
    if stored_dtype(numbers).is_floating_point:
        step = torch.maximum(x.abs().double() / 8, step * 2**-9)  # 3 bits of mantissa; 2^-9 is the least number
    error = (there_and_back(numbers, x) - x.double()).abs()
    assert bool((error <= 0.5 * step + 2**-11 * largest).all())


@by_name
def test_numbers_that_are_codes_come_back_as_they_are(numbers: Numbers) -> None:
    if stored_dtype(numbers).is_floating_point:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        x = every[every.isfinite()].repeat(2)
    else:
        assert numbers.largest is not None
        x = torch.arange(-numbers.largest, numbers.largest + 1).repeat(2)
    assert torch.equal(there_and_back(numbers, 0.25 * x), 0.25 * x.double())


@by_name
def test_zeros_and_what_a_scale_cannot_hold(numbers: Numbers) -> None:
    assert torch.equal(there_and_back(numbers, torch.zeros(2, 8)), torch.zeros(2, 8, dtype=torch.float64))
    tiny = torch.full((1, 8), 1e-9)
    assert torch.equal(there_and_back(numbers, tiny), torch.zeros(1, 8, dtype=torch.float64))
    rows = torch.ones(3, 8)
    rows[1, 5] = math.nan
    back = there_and_back(numbers, rows)
    assert back[1].isnan().all() and not back[[0, 2]].isnan().any()


@by_name
def test_a_row_does_not_depend_on_others(numbers: Numbers) -> None:
    x = torch.randn(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    alone = torch.cat([there_and_back(numbers, row[None]) for row in x])
    assert torch.equal(there_and_back(numbers, x), alone)


def test_two_values_share_a_byte() -> None:
    stored, scale = encode(NUMBERS["int4"], torch.tensor([[7.0, -7.0, 0.0, 1.0]]))
    assert stored.tolist() == [[15 | 1 << 4, 8 | 9 << 4]]
    assert scale is not None and scale.tolist() == [1.0]


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("format", [*FORMATS.values(), SMALL_KEYS], ids=lambda format: format.name)
def test_a_cache_gives_back_what_its_format_keeps(format: KVFormat, token_major: bool) -> None:
    cache = LayerKVCache.zeros(5, 2, 8, 4, dtype=format, token_major=token_major)
    assert cache.format == format
    assert (cache.num_blocks, cache.num_kv_heads, cache.head_dim, cache.block_size) == (5, 2, 8, 4)
    assert (None if cache.scales is None else cache.scales.shape) == ((5, 2, 4, 2) if format.is_scaled else None)
    assert sum(tensor.nbytes for tensor in cache.tensors) == 5 * 2 * 4 * format.num_bytes(8)
    slots = torch.randperm(20)[:9]
    k, v = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    cache.write(slots // 4, slots % 4, k, v)
    k_back, v_back = cache.read_tokens(slots // 4, slots % 4, torch.float64)
    assert torch.equal(k_back, there_and_back(format.keys, k))
    assert torch.equal(v_back, there_and_back(format.values, v))
    k_blocks, v_blocks = cache.read_blocks(torch.arange(5), torch.float64)
    assert torch.equal(k_blocks.transpose(1, 2).flatten(0, 1)[slots], k_back)
    assert torch.equal(v_blocks.transpose(1, 2).flatten(0, 1)[slots], v_back)


def test_a_format_that_the_cache_could_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="packs no numbers of 2 bits"):
        Numbers("int2", "uint8", 2, largest=1.0)
    with pytest.raises(ValueError, match="both stored with scales"):
        KVFormat("mixed", FORMATS["float16"].keys, FORMATS["int8"].values)
