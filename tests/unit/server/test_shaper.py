"""The shaper: what is kept, what is shared, who waits for whom, and what is cancelled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from headway.errors import InvalidRequestError
from headway.server.admission.fair_slots import FairSlots
from headway.server.api import shaper as shaper_module
from headway.server.api.api_errors import ApiError
from headway.server.api.shaper import LONG, SHORT, Shaper
from headway.server.limits import LIMITS
from headway.structured.helper_jobs import do_job
from headway.structured.helper_processes import HelpersLostError, Limits
from headway.structured.output_shape import ShapeJob


class ScriptedHelpers:
    """Jobs end when the test says so. A job with "long" in it breaks the limits of short ones, "endless" all limits."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Limits]] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.lost = 0
        self.shaper = Shaper(lambda: self, num_cores=4)

    def prepare(self) -> None: ...

    async def run_async(self, job: bytes, limits: Limits) -> bytes | None:
        text = job.decode()
        self.begun.append((text, limits))
        if self.lost:
            self.lost -= 1
            raise HelpersLostError("gone")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        if "endless" in text or ("long" in text and limits is SHORT):
            return None
        return do_job(None, job)

    def close(self) -> None: ...

    def ask(self, regex: str, client: str = "a") -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.shaper.shape(ShapeJob(constraint={"regex": regex}), client=client))

    async def held(self, *regexes: str) -> list[asyncio.Task[Any]]:
        """These jobs of one client, of which none ends."""
        self.gate.clear()
        jobs = [self.ask(regex) for regex in regexes]
        await settle()
        return jobs


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_same_is_worked_on_once_and_kept() -> None:
    helpers = ScriptedHelpers()
    both = await asyncio.gather(*(helpers.ask("a+", name) for name in "ab"))
    assert both[0] is both[1] is await helpers.ask("a+", "c")
    assert len(helpers.begun) == 1


async def test_what_is_not_short_gets_more_time_in_another_line_and_a_refusal_is_kept_too() -> None:
    helpers = ScriptedHelpers()
    assert (await helpers.ask("long")).grammar is not None
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="too long"):
            await helpers.ask("endless")
    assert [limits for _, limits in helpers.begun] == [SHORT, LONG] * 2


async def test_a_job_is_cancelled_when_the_last_client_has_left() -> None:
    helpers = ScriptedHelpers()
    (first,) = await helpers.held("a")
    second = helpers.ask("a", "b")
    await settle()
    first.cancel()
    await settle()
    assert helpers.cancelled == []
    second.cancel()
    await settle()
    assert len(helpers.cancelled) == 1
    helpers.gate.set()
    assert (await helpers.ask("a", "c")).grammar is not None  # nothing of it is left


async def test_one_that_waits_takes_no_slot_when_its_client_has_left() -> None:
    helpers = ScriptedHelpers()
    jobs = await helpers.held(*(f"a{n}" for n in range(20)))
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    helpers.gate.set()
    assert (await helpers.ask("b", "b")).grammar is not None
    assert len(helpers.begun) == 3  # two of them had begun


async def test_clients_take_turns() -> None:
    helpers = ScriptedHelpers()
    jobs = await helpers.held(*(f"a{n}" for n in range(10)))
    jobs.append(helpers.ask("b", "b"))
    await settle()
    helpers.gate.set()
    await asyncio.gather(*jobs)
    order = [text for text, _ in helpers.begun]
    assert next(place for place, text in enumerate(order) if '"b"' in text) <= 3


async def test_a_client_may_have_only_so_many_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaper_module, "LIMITS", replace(LIMITS, max_waiting_jobs_of_one=4))
    helpers = ScriptedHelpers()
    jobs = await helpers.held(*(f"a{n}" for n in range(4)))
    with pytest.raises(ApiError, match="waiting to be compiled") as refused:
        await helpers.ask("one more")
    assert (refused.value.status, refused.value.code) == (429, "grammar_queue_full")
    other = helpers.ask("b", "b")
    helpers.gate.set()
    await asyncio.gather(*jobs, other)


async def test_a_lost_nursery_costs_nothing_but_time() -> None:
    helpers = ScriptedHelpers()
    helpers.lost = 1
    assert (await helpers.ask("a")).grammar is not None


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaper_module, "LIMITS", replace(LIMITS, max_kept_shapes=3))
    helpers = ScriptedHelpers()
    for n in (*range(5), 4, 3, 2, 1):
        await helpers.ask(f"a{n}")
    assert len(helpers.begun) == 6


@pytest.mark.parametrize("seed", range(20))
async def test_slots_are_never_lost_nor_doubled(seed: int) -> None:
    """Random arrivals and departures: at most as many as there are slots hold one, and in the end all are free."""
    choose = random.Random(seed)
    slots, held, most = FairSlots(3), Counter[str](), 0

    async def hold(client: str) -> None:
        nonlocal most
        async with slots.slot(client):
            held[client] += 1
            most = max(most, held.total())
            try:
                for _ in range(choose.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                held[client] -= 1

    tasks: list[asyncio.Task[Any]] = []
    for _ in range(100):
        tasks.append(asyncio.ensure_future(hold(choose.choice("abc"))))
        if choose.random() < 0.4:
            choose.choice(tasks).cancel()
        if choose.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3
    assert held.total() == 0
    await asyncio.wait_for(asyncio.gather(*(hold("d") for _ in range(6))), 25)
