"""Argmax, GGUF dequantisation, the thread pool."""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time

import gguf
import numpy as np
import pytest
import torch

from headway import native
from headway.native.lib import NativeLibrary


@pytest.mark.parametrize("width", [1, 5, 63, 64, 8192, 8193, 49152])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_argmax(library: NativeLibrary, rows: int, width: int) -> None:
    logits = torch.randn(rows, width)
    assert torch.equal(native.argmax(logits, library), logits.argmax(-1))


def test_argmax_takes_the_lowest_index_among_equals(library: NativeLibrary) -> None:
    logits = torch.zeros(4, 20000)
    logits[1, [19999, 8192, 8191]] = 1.0
    logits[2] = -torch.inf
    logits[3, 100:] = -0.0
    assert native.argmax(logits, library).tolist() == [0, 8191, 0, 0]


def test_argmax_ignores_nan(library: NativeLibrary) -> None:
    logits = torch.randn(3, 9000).clamp(-3, 3)
    logits[0, :8500] = torch.nan
    logits[1, 4000] = 9.0
    logits[1, 4001] = torch.nan
    logits[2] = torch.nan
    expected = [8500 + int(logits[0, 8500:].argmax()), 4000, 0]
    assert native.argmax(logits, library).tolist() == expected


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
    """A lost or doubled item would change an argmax; thread counts change in between."""
    logits = torch.randn(7, 20000)
    expected = logits.argmax(-1)
    for i in range(300):
        library.set_num_threads(1 + i // 50 % 4)
        assert torch.equal(native.argmax(logits, library), expected)


def test_callers_in_several_threads(library: NativeLibrary) -> None:
    weight, x = torch.randn(300, 200), torch.randn(40, 200)
    packed = native.pack_int8(weight, library)
    expected = native.linear_int8(x, packed)
    equal = []

    def call() -> None:
        equal.append(all(torch.equal(native.linear_int8(x, packed), expected) for _ in range(50)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 4


def test_idle_pool_uses_no_cpu(fast: NativeLibrary) -> None:
    native.argmax(torch.randn(8, 20000))
    time.sleep(0.05)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05


def _in_child(logits: torch.Tensor, queue: multiprocessing.Queue[list[int]]) -> None:
    queue.put(native.argmax(logits).tolist())


def test_pool_restarts_after_fork(fast: NativeLibrary) -> None:
    logits = torch.arange(60000.0).view(3, 20000)  # made here: torch's own threads do not survive a fork
    assert native.argmax(logits).tolist() == [19999] * 3
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[int]] = context.Queue()
    child = context.Process(target=_in_child, args=(logits, queue))
    child.start()
    try:
        assert queue.get(timeout=20) == [19999] * 3
    finally:
        child.join(timeout=20)
        child.kill()


def test_fork_join_is_cheap(fast: NativeLibrary) -> None:
    """Loose on purpose: shared machines stall for milliseconds; a pool that slept between jobs would take ~50 us."""
    assert min(fast.released.hw_fork_join_ns(50) for _ in range(40)) < 20_000
