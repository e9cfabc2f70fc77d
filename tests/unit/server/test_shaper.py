"""The shaper: what is kept, what is shared, who waits for whom, and what is cancelled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from headway.errors import InvalidRequestError
from headway.server.admission.fair_slots import FairSlots
from headway.server.api import shaper as shaper_module
from headway.server.api.api_errors import ApiError
from headway.server.api.shaper import LONG, SHORT, Shaper
from headway.structured.answer_shape import ShapeJob
from headway.structured.helper_jobs import do_job
from headway.structured.helper_processes import HelpersLostError, Limits
from tests.unit.server.fake_engine import run


class ScriptedHelpers:
    """Jobs end when the test says so. A job with "long" in it breaks the limits of short ones, "endless" all limits."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Limits]] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.lost = 0

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


def regex(text: str) -> ShapeJob:
    return ShapeJob(constraint={"regex": text})


async def scripted() -> tuple[Shaper, ScriptedHelpers]:
    helpers = ScriptedHelpers()
    return Shaper(lambda: helpers, num_cores=4), helpers


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_same_is_worked_on_once_and_kept() -> None:
    shaper, helpers = await scripted()
    both = await asyncio.gather(*(shaper.shape(regex("a+"), client=name) for name in "ab"))
    assert both[0] is both[1] is await shaper.shape(regex("a+"), client="c")
    assert len(helpers.begun) == 1


async def test_a_refusal_is_kept_too() -> None:
    shaper, helpers = await scripted()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="too long"):
            await shaper.shape(regex("endless"), client="a")
    assert [limits for _, limits in helpers.begun] == [SHORT, LONG]


async def test_what_is_not_short_gets_more_time_in_another_line() -> None:
    shaper, helpers = await scripted()
    assert (await shaper.shape(regex("long"), client="a")).grammar is not None
    assert [limits for _, limits in helpers.begun] == [SHORT, LONG]


async def test_a_job_is_cancelled_when_the_last_client_has_left() -> None:
    shaper, helpers = await scripted()
    helpers.gate.clear()
    first, second = (asyncio.ensure_future(shaper.shape(regex("a"), client=name)) for name in "ab")
    await settle()
    first.cancel()
    await settle()
    assert helpers.cancelled == []
    second.cancel()
    await settle()
    assert len(helpers.cancelled) == 1
    helpers.gate.set()
    assert (await shaper.shape(regex("a"), client="c")).grammar is not None  # nothing of it is left


async def test_one_that_waits_takes_no_slot_when_its_client_has_left() -> None:
    shaper, helpers = await scripted()
    helpers.gate.clear()
    jobs = [asyncio.ensure_future(shaper.shape(regex(f"a{n}"), client="a")) for n in range(20)]
    await settle()
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    helpers.gate.set()
    assert (await shaper.shape(regex("b"), client="b")).grammar is not None
    assert len(helpers.begun) == 3  # two of them had begun


async def test_clients_take_turns() -> None:
    shaper, helpers = await scripted()
    helpers.gate.clear()
    jobs = [asyncio.ensure_future(shaper.shape(regex(f"a{n}"), client="a")) for n in range(10)]
    await settle()
    jobs.append(asyncio.ensure_future(shaper.shape(regex("b"), client="b")))
    await settle()
    helpers.gate.set()
    await asyncio.gather(*jobs)
    order = [text for text, _ in helpers.begun]
    assert next(place for place, text in enumerate(order) if '"b"' in text) <= 3


async def test_a_client_may_have_only_so_many_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaper_module, "MAX_WAITING_OF_ONE", 4)
    shaper, helpers = await scripted()
    helpers.gate.clear()
    jobs = [asyncio.ensure_future(shaper.shape(regex(f"a{n}"), client="a")) for n in range(4)]
    await settle()
    with pytest.raises(ApiError, match="waiting to be compiled") as refused:
        await shaper.shape(regex("one more"), client="a")
    assert (refused.value.status, refused.value.code) == (429, "grammar_queue_full")
    other = asyncio.ensure_future(shaper.shape(regex("b"), client="b"))
    helpers.gate.set()
    await asyncio.gather(*jobs, other)


async def test_a_lost_nursery_costs_nothing_but_time() -> None:
    shaper, helpers = await scripted()
    helpers.lost = 1
    assert (await shaper.shape(regex("a"), client="a")).grammar is not None


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaper_module, "MAX_KEPT", 3)
    shaper, helpers = await scripted()
    for n in (*range(5), 4, 3, 2, 1):
        await shaper.shape(regex(f"a{n}"), client="a")
    assert len(helpers.begun) == 6


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_never_lost_nor_doubled(seed: int) -> None:
    """Random arrivals and departures: at most as many as there are slots hold one, and in the end all are free."""
    choose = random.Random(seed)

    async def work() -> None:
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
        await asyncio.wait_for(asyncio.gather(*(hold("d") for _ in range(6))), 5)

    run(work())
