"""For every format: whatever is written is read back, and however the text is cut, the pieces add up to the same."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import InvalidRequestError
from headway.structured.output_spec import OutputSpec
from headway.structured.reasoning_formats import REASONING_FORMATS
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway.structured.tool_schemas import Tool, ToolCall
from tests.unit.structured.outputs import Output, cut, put_together, read

# Pieces of markers and of syntax, so that random texts come close to calls.
BITS = [
    *("<tool_call>", "</tool_call>", "<tool_c", "<", "[TOOL_CALLS]", "[", "]", "[ARGS]", "{", "}", '"', "'", "\\", ","),
    *(
        "<think>",
        "</think>",
        "\n",
        " ",
        "é",
        "日本",
        "😀",
        "name",
        '{"name": "',
        "get",
        "(",
        ")",
        "=",
        ";",
        "</function>",
    ),
    *("<parameter=", "\n</param", "</parameter>", "\x1f", "a", "\\u0041", "[THINK]", "[/THINK]", "<|python_tag|>"),
]
texts = st.lists(st.sampled_from(BITS), max_size=6).map("".join)
names = st.sampled_from(["get", "get_weather", "ge", "x-y.z"])
keys = st.sampled_from(["a", "b_c", "key", "n"])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(names, st.dictionaries(keys, values, max_size=3)), max_size=3)
# Each test of a format cuts hundreds of texts: few of them show what many do.
few = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def tools_for(made: list[tuple[str, dict[str, Any]]]) -> tuple[Tool, ...]:
    """Tools with the types of their arguments, as far as two calls agree on them."""
    types: dict[str, dict[str, Any]] = {name: {} for name in ("get", "get_weather", "ge", "x-y.z")}
    for name, arguments in made:
        for key, value in arguments.items():
            kind = "string" if isinstance(value, str) else "other"
            known = types[name].setdefault(key, kind)
            types[name][key] = known if known == kind else "both"
    schemas: dict[str, dict[str, Any]] = {
        "string": {"type": "string"},
        "other": {"type": ["number", "boolean", "null", "array", "object"]},
        "both": {},
    }
    return tuple(
        Tool(name, None, {"type": "object", "properties": {key: schemas[kind] for key, kind in found.items()}})
        for name, found in types.items()
    )


def can_be_written(name: str, made: list[tuple[str, dict[str, Any]]]) -> bool:
    """Raw text in tags cannot contain their end, nor a value of a type that a string is not told from."""
    tools = {tool.name: tool for tool in tools_for(made)}
    if name != "qwen3_coder":
        return True
    for called, arguments in made:
        for key, value in arguments.items():
            mixed = (tools[called].parameters or {})["properties"][key] == {}
            if mixed or (isinstance(value, str) and "\n</parameter>" in f"\n{value}\n"):
                return False
    return True


@pytest.mark.parametrize("name", TOOL_FORMATS)
@few
@given(made=calls)
def test_what_is_written_is_read_back(name: str, made: list[tuple[str, dict[str, Any]]]) -> None:
    if not can_be_written(name, made):
        return
    form = TOOL_FORMATS[name]
    text = form.write([ToolCall(called, json.dumps(arguments)) for called, arguments in made])
    got = read(OutputSpec(tools=tools_for(made), tool_format=form), text)
    assert (got.reasoning, got.content) == ("", "")
    assert [(call.name, json.loads(call.arguments)) for call in got.calls] == made


@pytest.mark.parametrize("name", TOOL_FORMATS)
@few
@given(made=calls, thought=texts, before=texts, behind=texts, data=st.data())
def test_cuts_change_nothing(
    name: str, made: list[tuple[str, dict[str, Any]]], thought: str, before: str, behind: str, data: st.DataObject
) -> None:
    form = TOOL_FORMATS[name]
    written = form.write([ToolCall(called, json.dumps(arguments)) for called, arguments in made])
    reasoning = data.draw(st.sampled_from([None, *REASONING_FORMATS.values()]))
    text = f"{before}{written}{behind}"
    if reasoning is not None and data.draw(st.booleans()):
        text = f"{reasoning.opening}{thought}{reasoning.closing}\n{text}"
    spec = OutputSpec(
        tools=tools_for(made),
        tool_format=form,
        parallel=data.draw(st.booleans()),
        reasoning=reasoning,
        starts_in_reasoning=data.draw(st.booleans()) if reasoning else False,
    )
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    whole = read(spec, text)
    assert read(spec, *text) == whole
    places = data.draw(st.lists(st.lists(st.integers(0, len(text)), max_size=8), min_size=3, max_size=3))
    for one in [*places, *([place] for place in range(0, len(text), 1 + len(text) // 12))]:
        assert read(spec, *cut(text, one)) == whole
    assert_a_prefix_is_never_taken_back(spec, text, whole)


def assert_a_prefix_is_never_taken_back(spec: OutputSpec, text: str, whole: Output) -> None:
    """What was streamed of an answer at any time is the beginning of the whole."""
    parser = spec.parser()
    pieces = []
    for letter in text:
        pieces += parser.feed(letter)
    so_far = put_together(pieces)
    assert whole.reasoning.startswith(so_far.reasoning)
    assert whole.content.startswith(so_far.content)
    assert len(so_far.calls) == len(whole.calls)
    for call, full in zip(so_far.calls, whole.calls):
        assert call.name == full.name and full.arguments.startswith(call.arguments)


WORDS = ["type", "properties", "required", "enum", "const", "anyOf", "items", "$ref", "$defs", "pattern", "minLength"]
KINDS = ["string", "object", "array", "null", "integer", "#/$defs/a", "#/properties/a", "^a/|\n$", "\\", "a"]
odd_schemas: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*WORDS, "a", "b"]), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(properties=odd_schemas, more=st.dictionaries(st.sampled_from(WORDS), odd_schemas, max_size=3))
def test_odd_schemas_give_a_grammar_or_are_refused(name: str, properties: Any, more: dict[str, Any]) -> None:
    tool = Tool("f", None, {"properties": {"a": properties, "b": properties}, **more})
    spec = OutputSpec(tools=(tool,), tool_format=TOOL_FORMATS[name])
    with contextlib.suppress(InvalidRequestError):
        assert "start:" in (spec.grammar({}) or "")
