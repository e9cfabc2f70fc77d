"""A client with small engines in processes of their own, and what tests say to it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import string
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.replica import Replica
from headway.front.streams import RequestStream
from headway.front.supervision import Backoff, Patience
from headway.sampling_params import SamplingParams
from headway.wire.messages import AddRequest, Delta

ROOT = Path(__file__).parents[3]
FACTORY = "tests.unit.engine_process.small_engine:create_engine"
PATIENCE = Patience(slow_step_s=0.4)
PROMPT = [5, 6, 7]


def small_client(patience: Patience = PATIENCE, **options: Any) -> EngineClient:
    """One that has not started. Options are its own and those of its engines, which start again soon."""
    resumes = options.pop("resumes", False)
    own = {name: options.pop(name) for name in inspect.signature(Deployment).parameters if name in options}
    return EngineClient(
        Deployment(options, **{"factory": FACTORY, "log_level": "CRITICAL", **own}),
        patience=patience,
        backoff=lambda: Backoff(first_s=0.05, longest_s=0.1),
        resumes=resumes,
    )


@contextlib.asynccontextmanager
async def started(patience: Patience = PATIENCE, **options: Any) -> AsyncIterator[EngineClient]:
    client = small_client(patience, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()


@contextlib.contextmanager
def serving(runner: asyncio.Runner, patience: Patience = PATIENCE, **options: Any) -> Iterator[EngineClient]:
    """One that several tests share."""
    client = small_client(patience, **options)
    runner.run(client.start())
    try:
        yield client
    finally:
        runner.run(client.shutdown())


def add(request_id: str, **params: Any) -> AddRequest:
    return AddRequest(request_id, PROMPT, SamplingParams(**{"max_tokens": 8, **params}))


async def read(stream: RequestStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


async def text_of(client: EngineClient, name: str, num_tokens: int) -> str:
    deltas = await read(client.submit(add(name, max_tokens=num_tokens)))
    assert deltas[-1].finish_reason == "length" and deltas[-1].error is None
    return "".join(delta.text for delta in deltas)


def expected(num_tokens: int, *, num_prompt_tokens: int = len(PROMPT)) -> str:
    """What the small engine answers."""
    return "".join(string.ascii_lowercase[(num_prompt_tokens + number) % 26] for number in range(num_tokens))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def all_ready(client: EngineClient) -> None:
    await until(lambda: all(replica.is_ready for replica in client.replicas))


def kill(replica: Replica, kind: signal.Signals = signal.SIGKILL) -> int:
    """Returns the id of the process that gets the signal."""
    assert replica.pid is not None
    os.kill(pid := replica.pid, kind)
    return pid
