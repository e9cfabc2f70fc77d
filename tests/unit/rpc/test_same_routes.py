"""What a server's router is told, told again to another one, gives the same decisions: the simulator has that one."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from headway.core.routing import ROUTERS, Router
from headway.rpc import engine_client
from headway.rpc.engine_client import EngineClient
from headway.rpc.messages import AddRequest
from headway.sampling_params import SamplingParams
from tests.unit.rpc.served import kill, read, started


class RecordingRouter(Router):
    """Keeps every call, and what came of it."""

    made: list[RecordingRouter]

    def __init__(self, name: str, *, block_size: int, counts_uncached: bool = False) -> None:
        super().__init__(name, block_size=block_size, counts_uncached=counts_uncached)
        self.told: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self.made.append(self)
        for target, calls in (
            (self, ("add", "remove", "suspend", "route", "note_tokens", "end")),
            (self.index, ("take",)),
        ):
            for call in calls:
                self._record(target, call)

    def _record(self, target: Any, call: str) -> None:
        real: Callable[..., Any] = getattr(target, call)

        def recorded(*arguments: Any, **named: Any) -> Any:
            if "digests" in named and not isinstance(named["digests"], tuple):
                digests = tuple(named["digests"]())
                named["digests"] = lambda: digests
            outcome = real(*arguments, **named)
            self.told.append((call, arguments, {**named, "block_size": self.block_size}, outcome))
            return outcome

        setattr(target, call, recorded)


@pytest.mark.parametrize("name", ROUTERS)
async def test_a_server_and_a_simulator_decide_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = importlib.import_module("headway.lab.sim.simulate")
    assert simulator.Router is Router, "the simulator's router is the server's"
    RecordingRouter.made = []
    monkeypatch.setattr(engine_client, "Router", RecordingRouter)

    rng = random.Random(0)
    beginnings = [[rng.randrange(4, 200) for _ in range(96)] for _ in range(6)]

    async def ask(client: EngineClient, number: int) -> None:
        await asyncio.sleep(rng.random())
        prompt = rng.choice(beginnings)[: rng.randrange(16, 97)] + [rng.randrange(4, 200) for _ in range(20)]
        params = SamplingParams(max_tokens=rng.randrange(1, 30))
        await read(client.submit(AddRequest(str(number), prompt, params)))

    async with started(resumes=True, num_replicas=3, router=name, step_s=0.001, num_kv_blocks=256) as client:
        asking = [asyncio.create_task(ask(client, number)) for number in range(100)]
        await asyncio.sleep(0.5)
        kill(client.replicas[1])
        await asyncio.gather(*asking)
    (recorded,) = RecordingRouter.made
    again = Router(name, block_size=1)
    decisions = []
    for call, arguments, named, outcome in recorded.told:
        again.block_size = named.pop("block_size")
        came = getattr(again.index if call == "take" else again, call)(*arguments, **named)
        assert came == outcome, f"{call}{arguments}"
        if call == "route":
            decisions.append(came)
    assert len(decisions) >= 100 and set(decisions) == {0, 1, 2}
    if again.needs_digests:
        assert sum(call == "take" for call, *_ in recorded.told) > 10, "caches were reported"
