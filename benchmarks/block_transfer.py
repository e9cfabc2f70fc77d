"""How fast KV blocks go from the memory of one engine process to that of another: `headway.transfer.block_server`.

python benchmarks/block_transfer.py                       shared memory and TCP, from a CPU engine's blocks
python benchmarks/block_transfer.py --device cuda         CUDA IPC into slots on the device and of pinned memory, TCP

The server has all blocks from the beginning, so this is the way alone: copying out between turns, the way, copying into
slots. `copies alone` are those from another process's device memory into slots here, by CUDA IPC, without messages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.core.kv.blocks import DIGEST_BYTES
from headway.kv.layer_cache import LayerKVCache
from headway.transfer.block_client import PeerBlocks
from headway.transfer.block_messages import Carrier, open_cuda, share_cuda
from headway.transfer.block_server import BlockAt, BlockServer
from headway.transfer.carriers import copy_rows
from headway.transfer.host_blocks import HostBlocks

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot

FINGERPRINT = "benchmark"


def digest(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=DIGEST_BYTES).digest()


class AllThere:
    """Blocks of a KV cache of an engine's shape: layers of two tensors each."""

    def __init__(self, num_blocks: int, block_bytes: int, device: str) -> None:
        num_layers, block_size, head_dim = 16, 16, 64
        num_heads = block_bytes // (num_layers * 2 * block_size * head_dim * 2)
        caches = [
            LayerKVCache.zeros(
                num_blocks,
                num_heads,
                head_dim,
                block_size,
                dtype=torch.bfloat16,
                device=torch.device(device),
                token_major=device != "cpu",
            )
            for _ in range(num_layers)
        ]
        self._blocks = HostBlocks(caches, 1)
        self.block_bytes = self._blocks.slot_bytes
        self._places = {digest(number): number for number in range(num_blocks)}

    def find(self, wanted: bytes) -> BlockAt | None:
        number = self._places.get(wanted)
        return None if number is None else BlockAt(False, number)

    def copy_out(self, blocks: Sequence[BlockAt], pieces: torch.Tensor, places: Sequence[int]) -> Callable[[], None]:
        return self._blocks.copy_out([(at.number, place) for at, place in zip(blocks, places, strict=True)], (), pieces)


def serve(pipe: Connection, carrier: Carrier, num_blocks: int, block_bytes: int, device: str, folder: str) -> None:
    """A process with blocks: turns as an idle engine does."""
    torch.set_num_threads(1)
    woken = threading.Event()
    server = BlockServer(
        AllThere(num_blocks, block_bytes, device),
        carrier=carrier,
        fingerprint=FINGERPRINT,
        folder=Path(folder),
        host="127.0.0.1",
        device=device,
        wake=woken.set,
    )
    pipe.send((server.address, server.offer.block_bytes))
    while not pipe.poll():
        woken.wait(0.1)
        woken.clear()
        while server.serve():
            pass
    server.close()


def share(pipe: Connection, num_blocks: int, block_bytes: int) -> None:
    """A process with device memory."""
    memory = torch.full((num_blocks, block_bytes), 3, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    pipe.send(share_cuda(memory))
    pipe.recv()


def measure(
    carrier: Carrier, *, num_blocks: int, block_bytes: int, device: str, num_runs: int, on_device: bool
) -> None:
    """Fetch all blocks several times. `on_device`: into device memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(theirs, carrier, num_blocks, block_bytes, device, folder))
        process.start()
        address, block_bytes = ours.recv()
        slots = torch.zeros(
            num_blocks,
            block_bytes,
            dtype=torch.uint8,
            device=device if on_device else "cpu",
            pin_memory=device != "cpu" and not on_device,
        )
        rooms: list[Slot] = [row if on_device else row.numpy().data.cast("B") for row in slots]
        digests = [digest(number) for number in range(num_blocks)]
        store = PeerBlocks(fingerprint=FINGERPRINT, cuda_device=None if device == "cpu" else 0)
        times = [fetch(store, digests, rooms, address) for _ in range(num_runs + 1)][1:]
        store.close()
        ours.send("end")
        process.join()
    best, median = min(times), statistics.median(times)
    rate = num_blocks * block_bytes / 1e9
    where = "device" if on_device else "pinned" if device != "cpu" else "memory"
    print(
        f"| {carrier} | {where} | {block_bytes / 2**10:,.0f} KiB | {num_blocks} | {rate / best:.2f} | "
        f"{rate / median:.2f} | {median / num_blocks * 1e6:,.0f} |"
    )


def fetch(store: PeerBlocks, digests: list[bytes], slots: list[Slot], address: str) -> float:
    """Seconds."""
    left, all_there = len(digests), threading.Event()
    failed = []

    def done(of: bytes, is_there: bool) -> None:
        nonlocal left
        left -= 1
        if not is_there:
            failed.append(of)
        if not left:
            all_there.set()

    started_s = time.perf_counter()
    store.fetch(digests, slots, address, done)
    all_there.wait()
    assert not failed, f"{len(failed)} blocks have not come"
    return time.perf_counter() - started_s


def measure_copies(num_blocks: int, block_bytes: int, num_runs: int) -> None:
    """Copies of blocks between two processes' device memories, timed by the device."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=share, args=(theirs, num_blocks, block_bytes))
    process.start()
    sources = open_cuda(ours.recv(), num_blocks, block_bytes, device=0).unbind(0)
    slots = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(num_runs + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        copy_rows(slots.unbind(0), sources)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    assert bool((slots == 3).all()), "the bytes are not those of the other process"
    del sources
    ours.send("end")
    process.join()
    rate = num_blocks * block_bytes / min(times[1:]) / 1e12
    print(f"copies alone: {num_blocks} blocks of {block_bytes / 2**10:,.0f} KiB at {rate:.2f} TB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 2048, 8192])
    parser.add_argument("--mib", type=int, default=512, help="what is moved at a time")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    carriers: tuple[Carrier, ...] = ("shm", "tcp") if arguments.device == "cpu" else ("cuda", "tcp")
    print("| carrier | to | block | blocks | GB/s, best | median | µs a block |\n|---|---|--:|--:|--:|--:|--:|")
    for carrier, on_device in [(each, False) for each in carriers] + [("cuda", True)] * (arguments.device == "cuda"):
        for block_kib in arguments.block_kib:
            measure(
                carrier,
                num_blocks=arguments.mib * 1024 // block_kib,
                block_bytes=block_kib * 1024,
                device=arguments.device,
                num_runs=arguments.runs,
                on_device=on_device,
            )
    if arguments.device == "cuda":
        print()
        for block_kib in arguments.block_kib:
            measure_copies(arguments.mib * 1024 // block_kib, block_kib * 1024, arguments.runs)


if __name__ == "__main__":
    main()
