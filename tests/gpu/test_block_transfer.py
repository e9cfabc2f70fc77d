"""Blocks of a KV cache on the device, in another process: over CUDA IPC and over TCP they come as they are, while the
process that has them goes on writing to others."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.triton_device import ON_GPU  # isort: split

from headway.core.blocks import DIGEST_BYTES
from headway.kv.host_blocks import HostBlocks, _as_bytes
from headway.kv.layer_cache import LayerKVCache
from headway.rpc.block_transfer import BlockAt, BlockServer, Carrier, PeerBlocks, open_cuda, share_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]

NUM_BLOCKS, NUM_SLOTS = 64, 8
SECRET = b"not to be told"


def digest(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=DIGEST_BYTES).digest()


class Memory:
    """The last blocks are in slots; the first two are written all the time, and not handed out."""

    def __init__(self) -> None:
        self._caches = [
            LayerKVCache.zeros(NUM_BLOCKS, 4, 64, 16, dtype=torch.bfloat16, device="cuda") for _ in range(6)
        ]
        for tensor in (tensor for cache in self._caches for tensor in cache.tensors):
            _as_bytes(tensor).random_(0, 256)
        self._memory = HostBlocks(self._caches, NUM_SLOTS)
        self.block_bytes = self._memory.slot_bytes
        parts = [_as_bytes(tensor).cpu() for cache in self._caches for tensor in cache.tensors]
        self.contents = torch.cat(parts, 1).numpy()
        self._memory.move_out([(NUM_BLOCKS - 1 - slot, slot) for slot in range(NUM_SLOTS)])

    def find(self, wanted: bytes) -> BlockAt | None:
        number = next((number for number in range(2, NUM_BLOCKS) if digest(number) == wanted), None)
        if number is None:
            return None
        is_on_host = number >= NUM_BLOCKS - NUM_SLOTS
        return BlockAt(is_on_host, NUM_BLOCKS - 1 - number if is_on_host else number)

    def copy_out(self, blocks: Sequence[BlockAt], pieces: torch.Tensor, places: Sequence[int]) -> Callable[[], None]:
        found = list(zip(blocks, places, strict=True))
        return self._memory.copy_out(
            [(at.number, place) for at, place in found if not at.is_on_host],
            [(at.number, place) for at, place in found if at.is_on_host],
            pieces,
        )

    def step(self) -> None:
        for tensor in (tensor for cache in self._caches for tensor in cache.tensors):
            tensor[:2] += 1


def serve(pipe: Connection, carrier: Carrier, folder: str) -> None:
    memory, woken = Memory(), threading.Event()
    server = BlockServer(
        memory,
        carrier=carrier,
        fingerprint="same",
        folder=Path(folder),
        host="127.0.0.1",
        secret=SECRET,
        device="cuda:0",
        places_bytes=5 * memory.block_bytes,
        wake=woken.set,
    )
    pipe.send((server.address, memory.contents))
    while not pipe.poll():
        memory.step()
        server.serve()
        woken.wait(0.001)
        woken.clear()
    server.close()


@pytest.mark.parametrize("carrier", ["cuda", "tcp"])
def test_blocks_of_another_process(carrier: Carrier) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(theirs, carrier, folder))
        process.start()
        address, contents = ours.recv()
        slots = np.zeros_like(contents)
        error = torch.cuda.cudart().cudaHostRegister(slots.ctypes.data, slots.nbytes, 0)
        assert int(error) == 0
        store = PeerBlocks(fingerprint="same", secret=SECRET, cuda_device=0)
        for _ in range(20):
            slots[:] = 0
            told: dict[bytes, bool] = {}
            is_done = threading.Event()

            def done(
                of: bytes, is_there: bool, told: dict[bytes, bool] = told, event: threading.Event = is_done
            ) -> None:
                told[of] = is_there
                if len(told) == NUM_BLOCKS - 1:
                    event.set()

            numbers = [*range(2, NUM_BLOCKS), 10_000]  # the last one is not there
            views = [memoryview(slots[number % NUM_BLOCKS].data) for number in numbers]
            store.fetch([digest(number) for number in numbers], views, address, done)
            assert is_done.wait(60)
            assert told.pop(digest(10_000)) is False and all(told.values())
            rows = [number for number in range(2, NUM_BLOCKS) if number != 10_000 % NUM_BLOCKS]
            assert (slots[rows] == contents[rows]).all()
        store.close()
        ours.send("end")
        process.join(60)
        torch.cuda.cudart().cudaHostUnregister(slots.ctypes.data)
    assert process.exitcode == 0


def share(pipe: Connection) -> None:
    memory = torch.arange(4096, dtype=torch.int32, device="cuda").view(torch.uint8).view(4, -1)
    torch.cuda.synchronize()
    pipe.send(share_cuda(memory))
    pipe.recv()


def test_device_memory_of_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=share, args=(theirs,))
    process.start()
    opened = open_cuda(ours.recv(), 4, 4096, device=0)
    assert opened.cpu().flatten().view(torch.int32).tolist() == list(range(4096))
    del opened
    ours.send("end")
    process.join(60)
    assert process.exitcode == 0
