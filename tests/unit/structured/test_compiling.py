"""Compiling grammars, also those that never end, take all memory or all of the stack; and its helper processes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.errors import HeadwayError, InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured import compiling
from headway.structured.compiling import GrammarCompiler, needs_trial
from headway.structured.grammars import grammar_of
from headway.structured.helper_jobs import LEAST_BYTES, Refusal, decode_result, encode_job
from headway.structured.helper_processes import HelperProcesses, Limits
from headway.structured.output_shape import Shape, ShapeJob
from headway.structured.tool_schemas import Tool
from tests.unit.structured.matching import embedded_tokenizer


def of(**structured: Any) -> str:
    return grammar_of(StructuredOutputsParams(**structured))


NUMBER = 2_500
NEVER = {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(30)]}
"""Takes minutes to compile."""
ENDLESS = of(json=NEVER)
PLAIN = of(json={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
WITH_PATTERN = of(json={"type": "string", "pattern": "^[a-z]+$"})
AMPLE = Limits(cpu_s=5.0, wall_s=30.0)
ENDLESS_JOB = encode_job(ShapeJob(constraint={"json": json.dumps(NEVER)}))
PLAIN_JOB = encode_job(ShapeJob(constraint={"regex": "a+"}))


def definitions(schema: Callable[[dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
    chain = {f"d{n}": schema({"$ref": f"#/$defs/d{n + 1}"}) for n in range(NUMBER)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": chain | {f"d{NUMBER}": {"type": "string"}}}}


def rules(body: Callable[[int], str], number: int) -> dict[str, Any]:
    return {"grammar": "\n".join(["start: r0", *(f"r{n}: {body(n)}" for n in range(number)), f'r{number}: "x"'])}


CHAINS: dict[str, Callable[[], dict[str, Any]]] = {
    "properties": lambda: definitions(lambda reference: {"type": "object", "properties": {"a": reference}}),
    "allOf": lambda: definitions(lambda reference: {"allOf": [reference]}),
    "rules": lambda: rules(lambda n: f'r{n + 1} | "{n}"', 3 * NUMBER),
    "groups": lambda: rules(lambda n: '("a" ' * 9 + f"r{n + 1}" + ")" * 9, NUMBER),
}


def compile_chain(name: str) -> str:
    compiler = GrammarCompiler(embedded_tokenizer(), 0)
    try:
        compiler.compile(of(**CHAINS[name]()))
    except InvalidRequestError as error:
        return str(error)
    finally:
        compiler.close()
    return ""


def test_long_chains_of_rules_and_references_do_not_end_the_process() -> None:
    """In a process of its own: what is tested for is that it lives."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        for name in CHAINS:
            other.submit(compile_chain, name).result(timeout=60)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(embedded_tokenizer(), 0)
    yield compiler
    nursery = compiler.helpers.nursery
    compiler.close()
    assert nursery is not None and nursery.poll() is not None, "a closed one leaves no process"


@pytest.mark.parametrize(
    ("grammar", "is_tried"),
    [
        (PLAIN, False),
        (of(choice=["yes", "no"]), False),
        (of(json_object=True), False),
        (WITH_PATTERN, True),
        (of(json={"type": "object", "patternProperties": {"^a": {}}}), True),
        (of(json={"type": "array", "items": {}, "maxItems": 500}), True),
        (of(json={"type": "object", "properties": {f"p{n}": {} for n in range(1_000)}}), True),
        (of(json={"type": "object"}, whitespace_pattern=" *"), True),
        (of(regex="a*"), True),
        (of(grammar='%llguidance {}\nstart: "a"'), True),
    ],
)
def test_what_a_request_can_make_large_is_tried_first(grammar: str, is_tried: bool) -> None:
    assert needs_trial(grammar) is is_tried


def test_a_grammar_that_never_compiles_is_refused_beside_others_and_leaves_nothing_behind(
    compiler: GrammarCompiler,
) -> None:
    compiler.compile(WITH_PATTERN)  # the nursery has started
    first, second = compiler.submit(ENDLESS), compiler.submit(ENDLESS)
    assert first is second, "who asks for the same waits for the same"
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(compiler.compile, [of(regex=f"[a-z]{{1,{n}}}") for n in range(2, 18)]))
    assert not any(matcher.is_error() for matcher in found)
    with pytest.raises(InvalidRequestError, match="too long"):
        second.result()
    nursery = compiler.helpers.nursery
    assert nursery is not None
    wait_for(lambda: not children(nursery.pid))
    assert not is_kept(compiler, ENDLESS)
    assert compiler.submit(PLAIN).result() is compiler.submit(PLAIN).result()


def test_memory_is_limited() -> None:
    program = (
        "from headway.structured.helper_processes import limit_memory; limit_memory(100_000_000); "
        "print(len(bytes(50_000_000))); bytes(200_000_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "50000000\n"
    assert "MemoryError" in done.stderr


def test_a_nursery_that_has_died_is_started_again(compiler: GrammarCompiler) -> None:
    nursery = compiler.helpers.nursery
    assert nursery is not None
    os.kill(nursery.pid, signal.SIGKILL)
    nursery.wait()
    grammar = of(regex="died|lives")
    try:
        compiler.compile(grammar)
    except HeadwayError as error:  # found out only now
        assert "died" in str(error)  # noqa: PT017
        compiler.compile(grammar)
    assert is_kept(compiler, grammar)


def test_what_is_kept_is_bounded_by_its_memory(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MEMORY_KEPT", 3 * LEAST_BYTES)
    grammars = [of(choice=[f"kept {n}"]) for n in range(5)]
    for grammar in grammars:
        compiler.compile(grammar)
    assert [is_kept(compiler, grammar) for grammar in grammars] == [False, False, True, True, True]


def test_a_grammar_that_was_tried_elsewhere_is_not_tried_again() -> None:
    compiler = GrammarCompiler(embedded_tokenizer(), 0)
    assert compiler.submit(WITH_PATTERN, 3 * LEAST_BYTES).result().num_bytes == 3 * LEAST_BYTES
    assert compiler.helpers.nursery is None
    compiler.close()


@pytest.mark.parametrize("hidden", ["A: /a&&&&&b/", 'A: "&&&&&"', "// &&&&&\nA: /a/"])
def test_intersections_are_counted_where_they_are_some(hidden: str) -> None:
    of(grammar=f"start: A\n{hidden}")
    with pytest.raises(InvalidRequestError, match="'&' at most 4"):
        of(grammar="start: A\nA: " + " & ".join(["/a*/"] * 6))


# ------------------------------------------------------------------------------------------------- helper processes
@pytest.fixture(scope="module")
def helpers() -> Iterator[HelperProcesses]:
    helpers = HelperProcesses({"tokenizer": "byte", "n_vocab": 262, "eos_token": [256]})  # built at once
    helpers.run(PLAIN_JOB, AMPLE)  # the nursery has started
    yield helpers
    helpers.close()


def answered(helpers: HelperProcesses, **fields: Any) -> Any:
    found = helpers.run(encode_job(ShapeJob(**fields)), AMPLE)
    assert found is not None
    return decode_result(found)


def test_a_shape_is_made_and_numbers_of_any_size_survive(helpers: HelperProcesses) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}})
    shape = answered(helpers, tools=(tool,), tool_format="hermes")
    assert isinstance(shape, Shape) and "%json" in str(shape.grammar)
    assert shape.parameters[0] is not None and shape.parameters[0]["properties"].keys() == {"n"}


def test_a_refusal_names_the_place(helpers: HelperProcesses) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"n": {"type": "nothing"}}})
    refusal = answered(helpers, tools=(tool,), tool_format="hermes")
    assert isinstance(refusal, Refusal) and (refusal.param or "").startswith("tools[0].function.parameters")


def test_a_job_larger_than_a_sockets_buffer_goes_through(helpers: HelperProcesses) -> None:
    choices = [f"{n:060}" for n in range(1_000)]
    shape = answered(helpers, constraint={"choice": choices})
    assert isinstance(shape, Shape) and choices[-1] in str(shape.grammar)


def test_processor_time_is_limited(helpers: HelperProcesses) -> None:
    begun_s = time.process_time()
    assert helpers.run(ENDLESS_JOB, Limits(cpu_s=0.1, wall_s=30.0)) is None
    assert time.process_time() - begun_s < 0.1  # of the caller's
    assert helpers.run(PLAIN_JOB, AMPLE) is not None


async def test_jobs_do_not_wait_for_each_other_and_are_killed_when_their_callers_are_cancelled(
    helpers: HelperProcesses,
) -> None:
    assert helpers.nursery is not None
    nursery = helpers.nursery.pid
    jobs = [asyncio.ensure_future(helpers.run_async(ENDLESS_JOB, AMPLE)) for _ in range(3)]
    while len(children(nursery)) < 3:
        await asyncio.sleep(0.01)
    assert await helpers.run_async(PLAIN_JOB, AMPLE) is not None
    assert not any(job.done() for job in jobs)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    wait_for(lambda: not children(nursery))
    assert helpers.run(PLAIN_JOB, AMPLE) is not None


def test_a_nursery_ends_with_its_engine_and_ends_its_helpers() -> None:
    """One whose engine closes its end while a helper waits for its job, and one whose engine dies."""
    program = (
        "import os; from headway.structured.helper_processes import HelperProcesses;"
        "parts = {'tokenizer': 'byte', 'n_vocab': 262, 'eos_token': [256]};"
        "closed, left = HelperProcesses(parts), HelperProcesses(parts); left.prepare(); channel = closed._begin();"
        "print(closed.nursery.pid, left.nursery.pid, flush=True);"
        "input(); closed._control.close(); input(); os._exit(1)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        closed, left = map(int, engine.stdout.readline().split())
        wait_for(lambda: len(children(closed)) == 1)
        (helper,) = children(closed)
        engine.stdin.write("\n")
        wait_for(lambda: not is_running(closed) and not is_running(helper))
        engine.stdin.write("\n")
        wait_for(lambda: not is_running(left))


def is_kept(compiler: GrammarCompiler, grammar: str) -> bool:
    return grammar in compiler._jobs


def children(pid: int) -> list[int]:
    return [one for one in map(int, filter(str.isdigit, os.listdir("/proc"))) if stat(one)[1:2] == [str(pid)]]


def is_running(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"])


def stat(pid: int) -> list[str]:
    """The state of a process, its parent, and more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 25.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)
