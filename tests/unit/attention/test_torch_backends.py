"""The torch backends against float64, which backend a name gives, and how keys are stored for it."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from tests.triton_device import DEVICE  # isort: split

from headway import native
from headway.attention import BACKEND_NAMES, create_backend
from headway.attention.torch_attention import TorchPaddedAttention, TorchReferenceAttention
from headway.errors import ConfigError
from headway.kv.layer_cache import LayerKVCache
from tests.unit.attention.paged_case import Length, PagedCase, Shape

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BY_TOKEN, TRANSPOSED = True, False

BACKENDS: dict[str, Any] = {
    "reference": functools.partial(TorchReferenceAttention, math_dtype=torch.float64),
    "padded": TorchPaddedAttention,
    "padded in many slices": functools.partial(TorchPaddedAttention, memory_budget_bytes=20_000),
    "padded one by one": functools.partial(TorchPaddedAttention, memory_budget_bytes=1),
}
# (new tokens, all tokens) of each request
DECODES = [(1, 1), (1, 17), (1, 33), (1, 128), (1, 5)]
PREFILLS = [(16, 16), (7, 30), (33, 33), (2, 129)]
MIXED = [(1, 40), (9, 9), (1, 1), (5, 64), (1, 64), (30, 31), (1, 129)]
SHAPES = [
    Shape(64, 2, 16, F32, TRANSPOSED),
    Shape(64, 2, 1, F32, BY_TOKEN),
    Shape(80, 2, 128, F32, TRANSPOSED),
    Shape(96, 2, 1, F32, TRANSPOSED),
    Shape(128, 2, 16, F32, BY_TOKEN),
    Shape(64, 2, 16, F32, TRANSPOSED, quantised="fp8"),
    Shape(64, 2, 16, F32, BY_TOKEN, quantised="int8"),
    Shape(64, 2, 16, F32, TRANSPOSED, quantised="int4"),
    Shape(64, 2, 16, BF16, TRANSPOSED),
    Shape(80, 3, 1, BF16, BY_TOKEN, num_kv_heads=3),
    Shape(64, 2, 16, F16, TRANSPOSED),
    Shape(96, 3, 16, F16, BY_TOKEN, num_kv_heads=3),
]
HEADS = [(1, 1), (3, 3), (6, 3), (9, 3), (8, 1), (32, 8)]
SHAPES += [Shape(32, q // kv, 16, F32, TRANSPOSED, num_kv_heads=kv) for q, kv in HEADS]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decodes", "prefills", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_step(shape: Shape, lengths: list[Length], backend: str) -> None:
    PagedCase(shape, lengths, backend=BACKENDS[backend]).check()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    draw = random.Random(seed)
    lengths = []
    for _ in range(draw.randint(1, 20)):
        seq_len = draw.randint(1, 200)
        lengths.append((1 if draw.random() < 0.6 else draw.randint(1, seq_len), seq_len))
    group, num_kv_heads = draw.choice([(1, 4), (4, 1), (3, 3)])
    head_dim, block_size = draw.choice([16, 64, 80]), draw.choice([1, 8, 16, 32, 128])
    shape = Shape(head_dim, group, block_size, F32, TRANSPOSED, num_kv_heads=num_kv_heads)
    PagedCase(shape, lengths, seed=seed, backend=TorchPaddedAttention).check()


def zeros(dtype: torch.dtype, **options: Any) -> LayerKVCache:
    return LayerKVCache.zeros(5, 2, 8, 4, dtype=dtype, **options)


@pytest.mark.parametrize("name", ["torch_padded", "torch_reference"])
def test_backend_of_a_name(name: str) -> None:
    backend = create_backend(name, caches := [zeros(F32)], 2)
    assert (backend.name, backend.kv_caches) == (name, caches)


def test_refusals() -> None:
    names = ", ".join(BACKEND_NAMES)
    with pytest.raises(ConfigError, match=f"unknown attention backend 'flash'; valid names are {names}"):
        create_backend("flash", [zeros(F32)], 2)
    if native.is_available():
        with pytest.raises(ConfigError, match="token_major"):
            create_backend("cpu", [zeros(F32, token_major=True)], 2)


@pytest.mark.parametrize("token_major", [False, True, None])
def test_cache_is_stored_as_asked_or_as_the_device_likes(token_major: bool | None) -> None:
    cache = zeros(F16, token_major=token_major, device=DEVICE)
    assert (cache.k.shape, cache.v.shape) == ((5, 2, 8, 4), (5, 2, 4, 8))
    assert (cache.num_blocks, cache.num_kv_heads, cache.head_dim, cache.block_size) == (5, 2, 8, 4)
    is_by_token = DEVICE.type == "cuda" if token_major is None else token_major
    assert cache.k.stride() == ((64, 32, 1, 8) if is_by_token else (64, 32, 4, 1))
    assert cache.v.is_contiguous()
    assert not cache.k.any() and not cache.v.any()
