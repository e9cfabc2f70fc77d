"""GGUF dequantisation, the thread pool."""

from __future__ import annotations

import multiprocessing
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch

from headway import native
from headway.layers.native_ops import Int8Linear, PackedLinear
from headway.native.lib import NativeLibrary


@pytest.mark.parametrize("name", sorted(native.GGUF_BLOCKS))
@pytest.mark.parametrize("blocks", [1, 33, 5000])
def test_dequantize_equals_gguf_bit_for_bit(library: NativeLibrary, name: str, blocks: int) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (blocks, native.GGUF_BLOCKS[name][1]), dtype=np.uint8)
    for at in (0, 2) if name == "Q4_1" else (0,):  # scales: random but finite, a few subnormal
        scales = (rng.standard_normal(blocks) * 0.1).astype(np.float16)
        scales[::7] = np.float16(3e-7)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(blocks, 2)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(-1)
    result = native.dequantize(name, torch.from_numpy(raw), (blocks, 32), library)
    assert result.shape == (blocks, 32)
    assert np.array_equal(result.numpy().reshape(-1).view(np.int32), expected.view(np.int32))


def test_dequantize_refuses_a_wrong_size(fast: NativeLibrary) -> None:
    with pytest.raises(ValueError, match="Q4_1"):
        native.dequantize("Q4_1", torch.zeros(19, dtype=torch.uint8), (32,))
    with pytest.raises(ValueError, match="Q6_K"):
        native.dequantize("Q6_K", torch.zeros(20, dtype=torch.uint8), (32,))


def test_number_of_threads(library: NativeLibrary) -> None:
    for n in (1, 3, 2):
        library.set_num_threads(n)
        assert library.get_num_threads() == n
    library.set_num_threads(0)
    assert library.get_num_threads() == 1


def test_many_small_jobs_all_finish(library: NativeLibrary) -> None:
    """A lost item would leave zeros in the result; thread counts change in between."""
    raw = torch.randint(0, 255, (34 * 640,), dtype=torch.uint8)
    expected = native.dequantize("Q8_0", raw, (640, 32), library).view(torch.int32)
    for i in range(300):
        library.set_num_threads(1 + i // 50 % 4)
        assert torch.equal(native.dequantize("Q8_0", raw, (640, 32), library).view(torch.int32), expected)


def test_callers_in_several_threads(library: NativeLibrary) -> None:
    weight, x = torch.randn(300, 200), torch.randn(40, 200)
    layer = PackedLinear(native.pack_int8(weight, library), None)
    expected = layer(x)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(lambda: all(torch.equal(layer(x), expected) for _ in range(50))) for _ in range(4)]
        assert all(call.result() for call in calls)


def test_idle_pool_uses_no_cpu(fast: NativeLibrary) -> None:
    Int8Linear(torch.randn(300, 200))(torch.randn(40, 200))
    time.sleep(0.05)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05


def _in_child(layer: Int8Linear, x: torch.Tensor, queue: multiprocessing.Queue[list[float]]) -> None:
    queue.put(layer(x).sum(-1).tolist())


def test_pool_restarts_after_fork(fast: NativeLibrary) -> None:
    layer, x = Int8Linear(torch.randn(300, 200)), torch.randn(40, 200)  # torch's own threads do not survive a fork
    expected = layer(x).sum(-1).tolist()
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[float]] = context.Queue()
    child = context.Process(target=_in_child, args=(layer, x, queue))
    child.start()
    try:
        assert queue.get(timeout=20) == expected
    finally:
        child.join(timeout=20)
        child.kill()


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_is_finite_looks_at_every_value(library: NativeLibrary, value: float) -> None:
    for size in (1, 15, 64, 1000, 200_001):
        tensor = torch.randn(size)
        tensor[0] = torch.finfo(torch.float32).max
        assert native.is_finite(tensor, library)
        for place in {0, size // 2, size - 1}:
            broken = tensor.clone()
            broken[place] = value
            assert not native.is_finite(broken, library), (size, place)
    assert native.is_finite(torch.empty(0), library)
