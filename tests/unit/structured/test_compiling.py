"""Compiling grammars, also those that never end, take all memory or all of the stack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.errors import HeadwayError, InvalidRequestError
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.sampling_params import StructuredOutputsParams
from headway.structured import compiling
from headway.structured.compiling import GrammarCompiler, needs_trial
from headway.structured.grammars import grammar_of
from headway.structured.helper_jobs import LEAST_BYTES

# In a process of its own: what is tested for is that it lives.
CHAIN_PROGRAM = """
import sys
from headway.errors import InvalidRequestError
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.sampling_params import StructuredOutputsParams
from headway.structured.grammars import grammar_of
from headway.structured.compiling import GrammarCompiler

NUMBER = 2_500


def definitions(schema):
    chain = {f"d{n}": schema({"$ref": f"#/$defs/d{n + 1}"}) for n in range(NUMBER)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": chain | {f"d{NUMBER}": {"type": "string"}}}}


def rules(body, number):
    return {"grammar": "\\n".join(["start: r0", *(f"r{n}: {body(n)}" for n in range(number)), f'r{number}: "x"'])}


CHAINS = {
    "properties": lambda: definitions(lambda reference: {"type": "object", "properties": {"a": reference}}),
    "allOf": lambda: definitions(lambda reference: {"allOf": [reference]}),
    "rules": lambda: rules(lambda n: f'r{n + 1} | "{n}"', 3 * NUMBER),
    "groups": lambda: rules(lambda n: '("a" ' * 9 + f"r{n + 1}" + ")" * 9, NUMBER),
}
tokenizer = open_checkpoint(embedded_model_path()).tokenizer()
try:
    GrammarCompiler(tokenizer, 0).compile(grammar_of(StructuredOutputsParams(**CHAINS[sys.argv[1]]())))
except InvalidRequestError as error:
    print(error)
print("alive")
"""


@pytest.mark.parametrize("chain", ["properties", "allOf", "rules", "groups"])
def test_long_chains_of_rules_and_references_do_not_end_the_process(chain: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHAIN_PROGRAM, chain], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("alive\n"), (done.returncode, done.stdout, done.stderr)


def of(**structured: Any) -> str:
    return grammar_of(StructuredOutputsParams(**structured))


ENDLESS = of(json={"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(30)]})
PLAIN = of(json={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
WITH_PATTERN = of(json={"type": "string", "pattern": "^[a-z]+$"})


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    tokenizer = open_checkpoint(embedded_model_path()).tokenizer()
    compiler = GrammarCompiler(tokenizer, 0)
    yield compiler
    compiler.close()


def test_what_headway_wrote_from_a_small_schema_needs_no_trial() -> None:
    assert not needs_trial(PLAIN)
    assert not needs_trial(of(choice=["yes", "no"]))
    assert not needs_trial(of(json_object=True))


@pytest.mark.parametrize(
    "grammar",
    [
        WITH_PATTERN,
        of(json={"type": "object", "patternProperties": {"^a": {}}}),
        of(json={"type": "array", "items": {}, "maxItems": 500}),
        of(json={"type": "object", "properties": {f"p{n}": {} for n in range(1_000)}}),
        of(json={"type": "object"}, whitespace_pattern=" *"),
        of(regex="a*"),
        of(grammar='%llguidance {}\nstart: "a"'),
    ],
)
def test_what_a_request_can_make_large_is_tried_first(grammar: str) -> None:
    assert needs_trial(grammar)


def test_a_grammar_that_never_compiles_is_refused_and_leaves_nothing_behind(compiler: GrammarCompiler) -> None:
    compiler.compile(WITH_PATTERN)  # the nursery has started
    with pytest.raises(InvalidRequestError, match="too long"):
        compiler.compile(ENDLESS)
    nursery = compiler.helpers.nursery
    assert nursery is not None
    wait_for(lambda: not children(nursery.pid))
    assert not is_kept(compiler, ENDLESS)
    assert compiler.compile(PLAIN).is_accepting() is False


def test_memory_is_limited() -> None:
    program = (
        "from headway.structured.helper_processes import limit_memory; limit_memory(100_000_000); "
        "print(len(bytes(50_000_000))); bytes(200_000_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "50000000\n"
    assert "MemoryError" in done.stderr


def test_many_trials_run_at_once(compiler: GrammarCompiler) -> None:
    grammars = [of(regex=f"[a-z]{{1,{n}}}") for n in range(2, 18)]
    with ThreadPoolExecutor(8) as threads:
        endless = threads.submit(compiler.compile, ENDLESS)
        found = list(threads.map(compiler.compile, grammars))
        assert all(not matcher.is_error() for matcher in found)
        with pytest.raises(InvalidRequestError, match="too long"):
            endless.result()


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


def test_a_closed_compiler_leaves_no_process() -> None:
    compiler = GrammarCompiler(open_checkpoint(embedded_model_path()).tokenizer(), 0)
    compiler.helpers.prepare()
    nursery = compiler.helpers.nursery
    assert nursery is not None
    compiler.close()
    assert nursery.poll() is not None


def test_a_nursery_ends_with_its_engine() -> None:
    program = (
        "import os; from headway.loader import open_checkpoint;"
        "from headway.loader.embedded import embedded_model_path;"
        "from headway.structured.compiling import GrammarCompiler;"
        "compiler = GrammarCompiler(open_checkpoint(embedded_model_path()).tokenizer(), 0);"
        "compiler.helpers.prepare(); print(compiler.helpers.nursery.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60)
    pid = int(done.stdout)
    wait_for(lambda: not is_running(pid))


def test_what_is_kept_is_bounded_by_its_memory(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MEMORY_KEPT", 3 * LEAST_BYTES)
    grammars = [of(choice=[f"kept {n}"]) for n in range(5)]
    for grammar in grammars:
        compiler.compile(grammar)
    assert [is_kept(compiler, grammar) for grammar in grammars] == [False, False, True, True, True]


@pytest.mark.parametrize("hidden", ["A: /a&&&&&b/", 'A: "&&&&&"', "// &&&&&\nA: /a/"])
def test_intersections_are_counted_where_they_are_some(hidden: str) -> None:
    of(grammar=f"start: A\n{hidden}")
    with pytest.raises(InvalidRequestError, match="'&' at most 4"):
        of(grammar="start: A\nA: " + " & ".join(["/a*/"] * 6))


def test_who_asks_for_the_same_waits_for_the_same(compiler: GrammarCompiler) -> None:
    first, second = compiler.submit(ENDLESS), compiler.submit(ENDLESS)
    assert first is second
    with pytest.raises(InvalidRequestError, match="too long"):
        second.result()
    assert compiler.submit(PLAIN).result() is compiler.submit(PLAIN).result()


def test_a_grammar_that_was_tried_elsewhere_is_not_tried_again() -> None:
    compiler = GrammarCompiler(open_checkpoint(embedded_model_path()).tokenizer(), 0)
    assert compiler.submit(WITH_PATTERN, 3 * LEAST_BYTES).result().num_bytes == 3 * LEAST_BYTES
    assert compiler.helpers.nursery is None
    compiler.close()


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
    until_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)
