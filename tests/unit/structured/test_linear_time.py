"""No text of a client takes long to read: the time grows with its length, and hostile ones are answered at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headway.errors import HeadwayError, InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.server.api.api_errors import as_sent, bad_request
from headway.server.http import asgi_io
from headway.structured.grammars import grammar_of
from headway.structured.json_pattern import PatternError, opposite_pattern
from headway.structured.json_schema import prepare_schema
from headway.structured.notations import NotationError, as_lark, num_intersections, regex_in_lark
from headway.structured.output_spec import OutputSpec
from headway.structured.python_literals import _json_of_word
from headway.structured.tool_arguments import _found_anywhere
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway.structured.tool_schemas import Tool, parameter_list, prepared_tool
from tests.attacks.hostile_inputs import hostile_grammars, hostile_regexes, hostile_schemas, hostile_tools
from tests.unit.structured.matching import soon

CHARS = 32 * 1024
UNITS = [
    *(
        '"',
        '\\"',
        '"\\"',
        "/",
        "\\/",
        "//",
        "/\\\n",
        "#",
        "\n",
        " ",
        "start",
        "start ",
        "start\n",
        "\\",
        "[",
        "^[",
        "]",
    ),
    *("a", "1", "0", "1e", ".1", "{", "{1", "(?<a", "`", " - at `", "structured_outputs", "structured_outputs.", "::="),
]


def names(text: str) -> None:
    parameter_list(Tool("t", parameters={"properties": {text: {}}}))


def sent(text: str) -> None:
    as_sent(bad_request(text, param="structured_outputs.json"), "response_format")


def written(**values: str) -> None:
    grammar_of(StructuredOutputsParams(**values))


def called(tools: list[dict[str, Any]], form: str) -> None:
    functions = [tool["function"] for tool in tools]
    made = [prepared_tool(Tool(one["name"], parameters=one.get("parameters")), "tools")[0] for one in functions]
    OutputSpec(tools=tuple(made), tool_format=TOOL_FORMATS[form], tool_choice="required").grammar({})


READERS: dict[str, Callable[[str], object]] = {
    "the start of Lark": lambda text: as_lark(f"start\n{text}"),
    "intersections": num_intersections,
    "intersections behind a quote": lambda text: num_intersections(f'start: "{text}'),
    "intersections behind a slash": lambda text: num_intersections(f"start: /{text}"),
    "a regex between slashes": lambda text: regex_in_lark(f"{text}."),
    "a pattern in tags": _found_anywhere,
    "the opposite of a pattern": opposite_pattern,
    "the opposite of a class": lambda text: opposite_pattern(f"^[{text}"),
    "a name of a parameter": names,
    "a word in Python": _json_of_word,
    "a decoder's message": lambda text: asgi_io._explain(text, asgi_io.msgspec.Struct),
    "an unknown field": lambda text: asgi_io._AT.search(f" - at `${text}"),
    "the path of a constraint": sent,
}


def seconds(reader: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    with contextlib.suppress(HeadwayError, NotationError, PatternError):
        reader(text)
    return time.process_time() - start


@pytest.mark.parametrize("name", READERS)
def test_twice_the_text_takes_twice_the_time(name: str) -> None:
    reader = READERS[name]
    for unit in UNITS:
        short = unit * (CHARS // len(unit))
        limit = max(0.1, 3 * seconds(reader, short))
        assert min(seconds(reader, short * 2) for _ in range(2)) < limit, unit


HOSTILE: dict[str, Callable[[], object]] = {
    **{f"schema: {name}": partial(prepare_schema, value, path="schema") for name, value in hostile_schemas()},
    **{f"regex: {name}": partial(written, regex=value) for name, value in hostile_regexes()},
    **{f"grammar: {name}": partial(written, grammar=value) for name, value in hostile_grammars()},
    **{
        f"tools, {form}: {name}": partial(called, value, form)
        for form, every in (("hermes", 1), ("qwen3_coder", 4), ("pythonic", 4))
        for name, value in hostile_tools()[::every]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_inputs_are_answered_at_once(name: str) -> None:
    with soon(), contextlib.suppress(InvalidRequestError):
        HOSTILE[name]()
