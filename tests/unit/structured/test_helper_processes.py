"""Helper processes: jobs that end, jobs that are killed, and callers that leave."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.structured.answer_shape import Shape, ShapeJob
from headway.structured.helper_jobs import GrammarJob, Refusal, decode_answer, encode_job
from headway.structured.helper_processes import HelperProcesses, Limits
from headway.structured.tool_schemas import Tool

AMPLE = Limits(cpu_s=5.0, wall_s=30.0)
BYTES = {"tokenizer": "byte", "n_vocab": 262, "eos_token": [256]}
"""A vocabulary that is built at once."""
ENDLESS = encode_job(
    ShapeJob(constraint={"json": json.dumps({"allOf": [{"pattern": f".*a.{{{n}}}b.*"} for n in range(30)]})})
)
"""Takes minutes to compile."""
PLAIN = encode_job(ShapeJob(constraint={"regex": "a+"}))


@pytest.fixture(scope="module")
def helpers() -> Iterator[HelperProcesses]:
    helpers = HelperProcesses(BYTES)
    helpers.run(PLAIN, AMPLE)  # the nursery has started
    yield helpers
    helpers.close()


def test_a_shape_is_made_and_numbers_of_any_size_survive(helpers: HelperProcesses) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}})
    found = helpers.run(encode_job(ShapeJob(tools=(tool,), tool_format="hermes")), AMPLE)
    assert found is not None
    shape = decode_answer(found)
    assert isinstance(shape, Shape)
    assert "%json" in str(shape.grammar)
    assert shape.parameters[0] is not None
    assert shape.parameters[0]["properties"].keys() == {"n"}


def test_a_refusal_names_the_place(helpers: HelperProcesses) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"n": {"type": "nothing"}}})
    found = helpers.run(encode_job(ShapeJob(tools=(tool,), tool_format="hermes")), AMPLE)
    assert found is not None
    refusal = decode_answer(found)
    assert isinstance(refusal, Refusal)
    assert (refusal.param or "").startswith("tools[0].function.parameters")


def test_processor_time_is_limited(helpers: HelperProcesses) -> None:
    begun_s = time.process_time()
    assert helpers.run(ENDLESS, Limits(cpu_s=0.1, wall_s=30.0)) is None
    assert time.process_time() - begun_s < 0.1  # of the caller's
    assert helpers.run(PLAIN, AMPLE) is not None


def test_a_helper_is_killed_when_its_caller_is_cancelled(helpers: HelperProcesses) -> None:
    assert helpers.nursery is not None
    nursery = helpers.nursery.pid

    async def leave() -> None:
        jobs = [asyncio.ensure_future(helpers.run_async(ENDLESS, AMPLE)) for _ in range(3)]
        while len(children(nursery)) < 3:
            await asyncio.sleep(0.01)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: not children(nursery))
    assert helpers.run(PLAIN, AMPLE) is not None


def test_jobs_of_one_loop_do_not_wait_for_each_other(helpers: HelperProcesses) -> None:
    async def both() -> bytes | None:
        slow = asyncio.ensure_future(helpers.run_async(ENDLESS, AMPLE))
        found = await helpers.run_async(PLAIN, AMPLE)
        assert not slow.done()
        slow.cancel()
        return found

    assert asyncio.run(both()) is not None


def test_a_job_larger_than_a_sockets_buffer_goes_through(helpers: HelperProcesses) -> None:
    choices = [f"{n:060}" for n in range(1_000)]
    found = helpers.run(encode_job(ShapeJob(constraint={"choice": choices})), AMPLE)
    assert found is not None
    shape = decode_answer(found)
    assert isinstance(shape, Shape)
    assert choices[-1] in str(shape.grammar)


def test_the_nursery_ends_its_helpers_when_its_caller_closes() -> None:
    helpers = HelperProcesses(BYTES)
    helpers.run(encode_job(GrammarJob('start: "a"')), AMPLE)
    assert helpers.nursery is not None
    nursery = helpers.nursery.pid
    wait_for(lambda: not children(nursery))
    channel = helpers._begin()  # a helper that waits for its job
    wait_for(lambda: len(children(nursery)) == 1)
    (helper,) = children(nursery)
    helpers._control.close()  # type: ignore[union-attr]
    helpers.nursery.wait(20)
    wait_for(lambda: not Path(f"/proc/{helper}").exists())
    channel.close()


def children(pid: int) -> list[int]:
    return [one for one in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(one) == pid]


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)
