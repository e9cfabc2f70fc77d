"""The GPU kernels at the sizes of real use, and each of them once at a small odd size for a memory checker.

The checker sees every access outside of an allocation, if each tensor has an allocation of its own:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_kernels.py -k sanitizer

Other sizes and all other properties are tested in tests/unit, which runs on a GPU as well where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.triton_device import DEVICE, ON_GPU  # isort: split

from headway.attention import HeadNorms, Heads
from headway.attention.base import NO_REQUEST
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import Norm, TorchLinear
from headway.layers.ops import TorchOps
from headway.layers.skinny_gemm import one_row, scaled_linear, swiglu
from headway.layers.triton_ops import TritonOps
from tests.unit.attention.paged_case import Length, PagedCase, Shape, with_room
from tests.unit.layers import skinny_case
from tests.unit.layers.skinny_case import EPS, Operands
from tests.unit.runner import test_device_rows, test_sampling_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LONGEST = 32_768
MANY = 256
GPU_GIBIBYTES = torch.cuda.get_device_properties(DEVICE).total_memory / 2**30 if ON_GPU else 0


# ------------------------------------------------------------------------------------------------ attention, full size

# Blocks of 16 are read through pointers, those of 256 by whole tiles.
FULL_SHAPES = [
    Shape(128, 2, 16, BF16, True, num_kv_heads=8),
    Shape(128, 4, 256, BF16, True, num_kv_heads=2),
    Shape(64, 7, 64, F16, True, num_kv_heads=2),
    Shape(64, 3, 16, F32, True, num_kv_heads=3),
    Shape(256, 8, 16, BF16, True, num_kv_heads=1),
    Shape(80, 1, 16, F16, False, num_kv_heads=4),
]


def spread_lengths(count: int) -> list[int]:
    """Up to the longest, evenly on a logarithmic scale."""
    return [round(LONGEST ** ((i + 1) / count)) for i in range(count)]


@pytest.mark.parametrize("shape", FULL_SHAPES, ids=str)
@pytest.mark.parametrize("num_requests", [1, 2, 7, 33, MANY])
def test_full_size_decode(shape: Shape, num_requests: int) -> None:
    """Contexts of any length next to each other: many splits, few, none."""
    PagedCase(shape, [(1, length) for length in reversed(spread_lengths(num_requests))]).check()


@pytest.mark.parametrize("shape", FULL_SHAPES, ids=str)
@pytest.mark.parametrize("length", [(8192, 8192), (2048, LONGEST), (1000, 12_345), (40, LONGEST)], ids=str)
def test_full_size_prefill(shape: Shape, length: Length) -> None:
    PagedCase(shape, [length]).check()


@pytest.mark.parametrize("shape", FULL_SHAPES, ids=str)
def test_full_size_mixed_step(shape: Shape) -> None:
    singles = [(1, 1 + 97 * r % 5000) for r in range(MANY - 4)]
    PagedCase(shape, [*singles, (2, 2), (700, 700), (512, 9000), (65, LONGEST)]).check()


@pytest.mark.skipif(GPU_GIBIBYTES < 40, reason="needs 40 GiB of GPU memory")
@pytest.mark.parametrize("block_size", [16, 256])
def test_full_size_cache_with_more_than_2_to_the_31_elements(block_size: int) -> None:
    """Addresses do not fit into 32 bits."""
    shape = Shape(128, 4, block_size, BF16, True, num_kv_heads=2)
    case = PagedCase(shape, [(1, LONGEST)] * (MANY - 2) + [(40, LONGEST), (40, LONGEST)])
    assert case.cache.k.numel() > 2**31
    case.check()


@pytest.mark.parametrize("shape", FULL_SHAPES[:3], ids=str)
def test_full_size_steps_in_a_graph(shape: Shape) -> None:
    """A captured step reads everything anew each time it is run, the number of requests included."""
    case = PagedCase(shape, [(1, length) for length in spread_lengths(48)])
    batch, q = with_room(case.batch(range(48)), 200), case.queries(range(48), num_padding=16)
    assert batch.parts is not None
    case.backend.plan(batch)
    case.backend.run(0, q)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.backend.run(0, q)
    for chosen in (range(48), range(47, -1, -1), [47], [5, 40] * 32, range(3)):
        parts, count = case.batch(chosen).parts, len(chosen)
        assert parts is not None and len(parts) <= len(batch.parts)
        batch.parts.fill_(NO_REQUEST)
        batch.parts[: len(parts)] = parts
        q[:count] = case.queries(chosen)
        graph.replay()
        assert torch.equal(out[:count].flatten(), torch.cat(case.run(chosen)).flatten())


def test_full_size_the_same_to_the_bit_each_time() -> None:
    shape = Shape(128, 4, 16, BF16, True, num_kv_heads=2)
    case = PagedCase(shape, [(1, LONGEST), (1, 20_001), (1, 777), (30, LONGEST), (300, 5000)])
    first = torch.cat(case.run())
    for _ in range(200):
        assert torch.equal(torch.cat(case.run()), first)


# ------------------------------------------------------------------------------------------- few rows, layers of models

# (outputs, inputs) of layers of models from 0.5B to 8B.
LAYERS = [(896, 4864), (1024, 3072), (4096, 1024), (6144, 4096), (4096, 12_288), (12_288, 4096), (151_936, 1024)]


def check_one_row(case: Operands) -> None:
    wanted = skinny_case.expected(case.x, case.weight, case.bias, norm=case.norm, residual=case.residual)
    one_row(case.x, case.weight, case.bias, norm=case.norm, eps=EPS, residual=case.residual)
    skinny_case.assert_near(case.residual, wanted)


def check_scaled_linear(case: Operands, num_parts: int) -> None:
    x = case.scaled_rows(num_parts=num_parts)
    wanted = skinny_case.expected(x.values, case.weight, case.bias, squares=x.squares)
    skinny_case.assert_near(scaled_linear(x, case.weight, case.bias, EPS), wanted)


def check_swiglu(case: Operands, num_parts: int, *, with_bias: bool = True) -> None:
    wanted = skinny_case.expected(case.x, case.weight, case.bias, swiglu=True)
    skinny_case.assert_near(swiglu(case.x, case.weight, case.bias), wanted)
    x = case.scaled_rows(num_parts=num_parts)
    bias = case.bias if with_bias else None
    wanted = skinny_case.expected(x.values, case.weight, bias, squares=x.squares, swiglu=True)
    skinny_case.assert_near(swiglu(x.values, case.weight, bias, squares=x.squares, eps=EPS), wanted)


@pytest.mark.parametrize(("outputs", "inputs"), LAYERS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_full_size_one_row(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    check_one_row(Operands(1, outputs, inputs, dtype))


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(896, 4864), (1024, 3072), (2048, 8192)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_full_size_split_add(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    case = Operands(rows, outputs, inputs, dtype)
    skinny_case.check_split_add(case, case.bias)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(1152, 896), (4096, 1024), (6144, 2048)])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_full_size_scaled_linear(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    check_scaled_linear(Operands(rows, outputs, inputs, dtype), inputs // 32)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(4864, 896), (3072, 1024), (12_288, 4096)])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_full_size_swiglu(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    check_swiglu(Operands(rows, outputs, inputs, dtype, gated=True), inputs // 32)


# ---------------------------------------------------------------------------------- each kernel once, small and odd


@pytest.mark.parametrize(
    "shape",
    [
        Shape(80, 3, 8, F32, False, num_kv_heads=3),
        Shape(96, 7, 1, BF16, True, num_kv_heads=1),
        Shape(64, 5, 64, F16, True, num_kv_heads=3),
        Shape(128, 1, 128, BF16, True, num_kv_heads=1),
        Shape(256, 2, 16, BF16, True, num_kv_heads=1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1), (1, 63), (1, 331)],
        [(2, 2), (67, 67), (5, 131)],
        [(1, 1), (1, 331), (2, 2), (19, 130)],
        [(3, 901), (35, 1203)],
    ],
    ids=["decode", "prefill", "mixed", "cut"],
)
def test_sanitizer_attention(shape: Shape, lengths: list[Length]) -> None:
    PagedCase(shape, lengths).check()


def test_sanitizer_attention_with_padding() -> None:
    PagedCase(Shape(64, 2, 16, BF16, True), [(1, 70), (1, 3)]).check(num_padding=3)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 13), (67, 1031), (5, 2053)])
def test_sanitizer_few_rows(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    check_one_row(Operands(1, outputs, inputs, dtype))
    gated_row = Operands(1, outputs, inputs, dtype, gated=True)
    wanted = skinny_case.expected(gated_row.x, gated_row.weight, gated_row.bias, norm=gated_row.norm, swiglu=True)
    got = one_row(gated_row.x, gated_row.weight, gated_row.bias, norm=gated_row.norm, eps=EPS, swiglu=True)
    skinny_case.assert_near(got, wanted)

    rows = Operands(19, outputs, inputs, dtype)
    skinny_case.check_split_add(rows, rows.bias)
    check_scaled_linear(rows, 3)
    check_swiglu(Operands(19, outputs, inputs, dtype, gated=True), 3, with_bias=False)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("token_major", [True, False])
def test_sanitizer_row_wise_ops(token_major: bool, dtype: torch.dtype) -> None:
    """Norm with a sum, gate, rotation and the write to the cache, in which two of five tokens are padding."""
    ops, reference = TritonOps(), TorchOps()

    residual, weight = _randn(5, 77, dtype=dtype), _randn(77, dtype=dtype)
    delta, gate_up = _randn(5, 77, dtype=dtype), TorchLinear(_randn(2 * 33, 77, dtype=dtype) / 8)
    expected_residual = residual.clone()
    _assert_close(
        gate_up.after_norm(Norm(weight, EPS, ops.norm), ops.silu_mul)(residual, delta),
        gate_up.after_norm(Norm(weight, EPS, reference.norm), reference.silu_mul)(expected_residual, delta),
    )
    _assert_close(residual, expected_residual)

    heads = Heads(5, 3, 80, _randn(11, 80), EPS)
    norms = HeadNorms(_randn(80, dtype=dtype), _randn(80, dtype=dtype))
    qkv = _randn(5, heads.qkv_size, dtype=dtype)
    positions, slots = _int32([0, 10, 3, 7, 7]), _int32([20, -1, 0, -5, 9])
    caches = [LayerKVCache.zeros(3, 3, 80, 7, dtype=dtype, device=DEVICE, token_major=token_major) for _ in range(2)]
    got = ops.rope_write_kv(qkv, positions, slots, heads, norms, caches[0])
    real = slots >= 0
    expected = reference.rope_write_kv(qkv[real], positions[real], slots[real].long(), heads, norms, caches[1])
    _assert_close(got[real], expected)
    _assert_close(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].v, caches[1].v)


@pytest.mark.parametrize("seed", range(3))
def test_sanitizer_rows(seed: int) -> None:
    test_device_rows.test_random_steps_read_every_requests_own_tokens_from_its_own_blocks(seed)


@pytest.mark.parametrize("step", ["flat", "some_combinations", "filters-5003-torch.float16"])
def test_sanitizer_sampling(step: str) -> None:
    """Vocabularies that leave the last tile of each kernel partly empty."""
    test_sampling_kernels.test_each_row_draws_what_brute_force_draws("triton", step)


def _randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(DEVICE, dtype)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def _assert_close(got: Tensor, expected: Tensor) -> None:
    """To a few last bits of the largest value: both round in the same places, but what they round may differ a bit."""
    tolerance = 8 * torch.finfo(got.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0.0, atol=tolerance)
