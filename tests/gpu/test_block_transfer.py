"""Blocks of a KV cache on the device, in another process: over CUDA IPC and over TCP they come as they are, while the
process that has them goes on writing to others."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import queue
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.triton_device import ON_GPU  # isort: split

from headway.core.kv.blocks import DIGEST_BYTES
from headway.front import prefills
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.roles import Roles
from headway.kv.layer_cache import LayerKVCache
from headway.sampling_params import SamplingParams
from headway.transfer.block_client import PeerBlocks
from headway.transfer.block_messages import Carrier
from headway.transfer.block_server import BlockAt, BlockServer
from headway.transfer.carriers import open_cuda, share_cuda
from headway.transfer.host_blocks import HostBlocks, _as_bytes
from headway.wire.messages import AddRequest
from tests.unit.models.tiny import hf_model, save_folder

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]

NUM_BLOCKS, NUM_SLOTS = 64, 8


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


@contextlib.contextmanager
def process_that(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A pipe to another process, which ends with the test, however that ends. If it dies, reading the pipe fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send("end")
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


@pytest.mark.parametrize(("carrier", "on_device"), [("cuda", True), ("cuda", False), ("tcp", False)])
def test_blocks_of_another_process(carrier: Carrier, on_device: bool) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        process_that(serve, carrier, folder) as pipe,
        contextlib.closing(PeerBlocks(fingerprint="same", cuda_device=0)) as store,
    ):
        address, contents = pipe.recv()
        slots = torch.zeros(contents.shape, dtype=torch.uint8, device="cuda" if on_device else "cpu")
        if not on_device:
            slots = slots.pin_memory()
        numbers = [*range(2, NUM_BLOCKS), 10_000]  # the last one is not there
        there = [number for number in range(2, NUM_BLOCKS) if number != 10_000 % NUM_BLOCKS]
        rows = [slots[number % NUM_BLOCKS] for number in numbers]
        rooms: list[Slot] = [row if on_device else row.numpy().data.cast("B") for row in rows]
        for _ in range(20):
            slots.zero_()
            torch.cuda.synchronize()
            answers: queue.Queue[tuple[bytes, bool]] = queue.Queue()
            store.fetch([digest(n) for n in numbers], rooms, address, lambda *told, to=answers: to.put(told))
            told = dict(answers.get(timeout=60) for _ in numbers)
            assert told.pop(digest(10_000)) is False and len(told) == NUM_BLOCKS - 2 and all(told.values())
            assert (slots[there].cpu().numpy() == contents[there]).all()


def share(pipe: Connection) -> None:
    memory = torch.arange(4096, dtype=torch.int32, device="cuda").view(torch.uint8).view(4, -1)
    torch.cuda.synchronize()
    pipe.send(share_cuda(memory))
    pipe.recv()


def test_device_memory_of_another_process() -> None:
    with process_that(share) as pipe:
        opened = open_cuda(pipe.recv(), 4, 4096, device=0)
        assert opened.cpu().flatten().view(torch.int32).tolist() == list(range(4096))
        del opened


@pytest.mark.parametrize("more", [{}, {"host_cache_memory": 2**24}], ids=["on the device", "over host memory"])
def test_prefill_and_decode_apart_have_the_tokens_of_one_engine(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_folder(hf_model("qwen3", num_hidden_layers=2, max_position_embeddings=1024), tmp_path))
    options = {"model": folder, "device": "cuda", "dtype": "float32", "num_kv_blocks": 256, "block_size": 16, **more}
    rng = random.Random(0)
    shared = [rng.randrange(5, 90) for _ in range(100)]
    lengths = [rng.randrange(1, 700) for _ in range(12)]
    prompts = [shared[: length % 100] + [rng.randrange(5, 90) for _ in range(length)] for length in lengths]

    async def ask(**how: Any) -> list[list[int]]:
        client = EngineClient(Deployment(options, log_level="ERROR", **how))
        await client.start()

        async def answer(number: int) -> list[int]:
            params = SamplingParams(
                max_tokens=12, temperature=0.8 * (number % 2), seed=number, ignore_eos=True, detokenize=False
            )
            found = []
            async with client.submit(AddRequest(f"r{number}", prompts[number], params)) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        assert delta.error is None
                        found += delta.token_ids
            return found

        try:
            answers = await asyncio.gather(*map(answer, range(len(prompts))))
            if "roles" in how:
                stats = client.replicas[0].stats
                assert client.prefill_outcomes["elsewhere"] > 6, client.prefill_outcomes
                assert stats.tiers.num_moved_in_blocks > 100
            return answers
        finally:
            await client.shutdown()

    alone = asyncio.run(ask())
    monkeypatch.setattr(prefills, "computes_elsewhere", lambda choice: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    assert asyncio.run(ask(roles=Roles(1, 1))) == alone
