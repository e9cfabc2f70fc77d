"""Prefill and decode apart against together, with as many engine processes: how long a prompt waits for its first
token, and what those notice who are generating meanwhile.

    python benchmarks/roles.py                      --roles prefill=1,decode=1 against --replicas 2, on the CPU's cores
    python benchmarks/roles.py --model llama31-8b --load-format dummy --device cuda --lengths 1000 4000

Prompts of random tokens come one after the other, so that nothing is cached, while nobody or so many streams generate;
a stream that has ended is followed by the next. TTFT is the median of the prompts, ITL P99 that of the streams' times
between tokens while a prompt was on its way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from headway.front.engine_client import EngineClient
from headway.front.roles import Roles
from headway.sampling_params import SamplingParams
from headway.wire.messages import AddRequest, Delta


class Load:
    """Streams that generate all the time."""

    def __init__(self, client: EngineClient, rng: random.Random, *, vocab_size: int, num_tokens: int) -> None:
        self._client, self._rng = client, rng
        self._vocab_size, self._num_tokens = vocab_size, num_tokens
        self.gaps: list[tuple[float, float]] = []
        """(when a token came, after how long)"""
        self.num_generating = 0

    async def stream(self) -> None:
        """One after the other, until it is cancelled."""
        while True:
            prompt = [self._rng.randrange(1, self._vocab_size) for _ in range(16)]
            last_s = None
            async for delta in answer(self._client, prompt, self._num_tokens):
                now_s = time.perf_counter()
                if last_s is None:
                    self.num_generating += 1
                elif delta.token_ids:
                    self.gaps.append((now_s, now_s - last_s))
                last_s = now_s
            self.num_generating -= 1


_ids = itertools.count()


async def answer(client: EngineClient, prompt: list[int], num_tokens: int) -> AsyncIterator[Delta]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    async with client.submit(AddRequest(f"r{next(_ids)}", prompt, params)) as stream:
        async for deltas in stream:
            for delta in deltas:
                assert delta.error is None, delta.error
                yield delta


async def measure(client: EngineClient, arguments: argparse.Namespace, num_streams: int) -> list[tuple[float, float]]:
    """For each length of prompts: median TTFT and the others' ITL P99, in seconds."""
    rng = random.Random(arguments.seed)
    assert client.info is not None
    vocab_size = client.info.vocab_size
    load = Load(client, rng, vocab_size=vocab_size, num_tokens=arguments.stream_tokens)
    streams = [asyncio.create_task(load.stream()) for _ in range(num_streams)]
    found = []
    try:
        while load.num_generating < num_streams:
            await asyncio.sleep(0.01)
        for length in arguments.lengths:
            times: list[float] = []
            gaps: list[float] = []
            for number in range(arguments.prompts + 1):
                prompt = [rng.randrange(1, vocab_size) for _ in range(length)]
                begun_s = time.perf_counter()
                async for _ in answer(client, prompt, 1):
                    pass
                first_s = time.perf_counter()
                await asyncio.sleep(arguments.pause_s)
                if number:  # the first one of a kind is a warm-up
                    times.append(first_s - begun_s)
                    gaps += [gap for at_s, gap in load.gaps if begun_s <= at_s <= first_s + arguments.pause_s / 2]
            worst = sorted(gaps)[int(len(gaps) * 0.99)] if gaps else float("nan")
            found.append((statistics.median(times), worst))
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found


async def run(name: str, arguments: argparse.Namespace, **how: Any) -> list[list[tuple[float, float]]]:
    options = {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "model": arguments.model,
        "load_format": arguments.load_format,
        "max_model_len": arguments.max_model_len,
        "kv_cache_memory": arguments.kv_cache_memory,
    }
    client = EngineClient({key: value for key, value in options.items() if value is not None}, log_level="ERROR", **how)
    await client.start()
    try:
        found = [await measure(client, arguments, num_streams) for num_streams in arguments.streams]
        sent = client.stats.transfers
        hidden = f"{sent.num_early_blocks / sent.num_sent_blocks:.0%}" if sent.num_sent_blocks else "none"
        print(
            f"<!-- {name}: {dict(client.prefill_outcomes)}, {sent.num_sent_blocks} blocks, {hidden} of them sent "
            "while their prompt was being computed -->",
            flush=True,
        )
        return found
    finally:
        await client.shutdown()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roles", default="prefill=1,decode=1")
    parser.add_argument("--model")
    parser.add_argument("--load-format")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-cache-memory", type=int, help="bytes, where engines share a GPU")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 1800])
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--stream-tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    roles = Roles.parse(arguments.roles)
    print("| run | streams | prompt | TTFT together, ms | apart | ITL P99 of others together, ms | apart |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for repeat in range(arguments.repeats):
        together = await run("together", arguments, num_replicas=roles.num_replicas)
        apart = await run("apart", arguments, roles=roles)
        for num_streams, whole, parted in zip(arguments.streams, together, apart, strict=True):
            for length, one, other in zip(arguments.lengths, whole, parted, strict=True):
                cells = [f"{1e3 * value:.1f}" for value in (one[0], other[0], one[1], other[1])]
                print(f"| {repeat + 1} | {num_streams} | {length:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
