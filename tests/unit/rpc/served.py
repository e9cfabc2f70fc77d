"""A client with a small engine in a process of its own, and what tests say to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.routing import Roles
from headway.rpc.backoff import Backoff
from headway.rpc.engine_client import EngineClient
from headway.rpc.messages import AddRequest, Delta
from headway.rpc.streams import RequestStream
from headway.rpc.supervision import Patience
from headway.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]
FACTORY = "tests.unit.rpc.small_engine:create_engine"
PATIENCE = Patience(slow_step_s=0.4)


class Served:
    """An event loop that stands still between tests, with a client in it."""

    def __init__(self, runner: asyncio.Runner, client: EngineClient) -> None:
        self.client = client
        self._runner = runner

    def run(self, test: Callable[[EngineClient], Awaitable[None]], *, limit_s: float = 200.0) -> None:
        async def with_limit() -> None:
            async with asyncio.timeout(limit_s):
                await test(self.client)

        self._runner.run(with_limit())


@contextlib.contextmanager
def serving(
    patience: Patience = PATIENCE,
    *,
    resumes: bool = False,
    replicas: int = 1,
    router: str = "prefix-aware",
    reports_caches: bool = False,
    roles: Roles | None = None,
    **options: Any,
) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        client = EngineClient(
            options,
            factory=FACTORY,
            patience=patience,
            backoff=lambda: Backoff(first_s=0.05),
            log_level=os.environ.get("LL", "CRITICAL"),
            resumes=resumes,
            num_replicas=replicas,
            router=router,
            reports_caches=reports_caches,
            roles=roles,
        )
        runner.run(client.start())
        try:
            yield Served(runner, client)
        finally:
            runner.run(client.shutdown())


def add(request_id: str, **params: Any) -> AddRequest:
    return AddRequest(request_id, [5, 6, 7], SamplingParams(**{"max_tokens": 8, **params}))


async def read(stream: RequestStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
