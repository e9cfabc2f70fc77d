"""Grammars of answers: they accept what the writer writes, refuse what a schema forbids, and leave other text alone.

What a model writes under the masks is what the parser reads: random walks through them show it.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

import jsonschema
import llguidance
import pytest
import tokenizers

from headway.errors import InvalidRequestError
from headway.structured.output_spec import OutputSpec
from headway.structured.reasoning_formats import REASONING_FORMATS
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway.structured.tool_schemas import Tool, ToolCall
from tests.unit.structured.matching import allowed_by, embedded_tokenizer, matcher_of, walk
from tests.unit.structured.outputs import ANY, GET, TOOLS, WEATHER, Output, read

THINK = REASONING_FORMATS["think"]
MARKERS = tuple(dict.fromkeys([*THINK.markers, *(text for one in TOOL_FORMATS.values() for text in one.markers)]))
# Spelled to their ends, so that walks come to an end.
WAYS_OUT = ("\n</parameter>", '"', "'", "}", "]", ")", "\n", "</tool_call>", "</function>", "</think>", ">")
JSON_CONTENT = 'start: %json {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}'


@dataclass(frozen=True)
class Vocabulary:
    backend: tokenizers.Tokenizer
    llguidance: llguidance.LLTokenizer
    special: Mapping[str, int]
    ends: frozenset[int]

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def verdict(self, spec: OutputSpec, text: str) -> str:
        """Whether the grammar takes the text as a whole, as the beginning of an answer, or not."""
        matcher = self.matcher(spec)
        tokens = self.encode(text)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return "refused"
        return "whole" if matcher.is_accepting() else "begun"

    def matcher(self, spec: OutputSpec) -> llguidance.LLMatcher:
        grammar = spec.grammar(self.special)
        assert grammar is not None
        return matcher_of(self.llguidance, grammar)

    def allowed(self, matcher: llguidance.LLMatcher) -> list[int]:
        return allowed_by(matcher.compute_bitmask()).tolist()


@functools.cache
def vocabulary(markers: tuple[str, ...]) -> Vocabulary:
    """The embedded model's, with markers as tokens of their own."""
    tokenizer = embedded_tokenizer()
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in markers])
    known = llguidance.LLTokenizer(backend.to_str(), eos_token=list(tokenizer.eos_token_ids))
    special = {text: backend.token_to_id(text) for text in (*markers, "<|im_start|>")}
    return Vocabulary(backend, known, special, frozenset(tokenizer.eos_token_ids))


def spec(name: str, **options: object) -> OutputSpec:
    return OutputSpec(**{"tools": TOOLS, "tool_format": TOOL_FORMATS[name], **options})  # type: ignore[arg-type]


CITY = {
    "city": "L'\"Aq\\uila é\n{[",
    "days": -3,
    "unit": "C",
    "place": {"lat": 1.5, "note": "x"},
    "tags": ["a", "b"],
}
CALLS = [
    ToolCall("get_weather", json.dumps(CITY, ensure_ascii=False)),
    ToolCall("get", '{"n": 7}'),
    ToolCall("any-thing", '{"a": [1, {"b": null}], "c": "d"}'),
]
both_vocabularies = pytest.mark.parametrize("markers", [(), MARKERS], ids=["text", "special"])
every_format = pytest.mark.parametrize("name", TOOL_FORMATS)


@both_vocabularies
@every_format
def test_what_is_written_is_accepted(name: str, markers: tuple[str, ...]) -> None:
    known = vocabulary(markers)
    text = TOOL_FORMATS[name].write(CALLS)
    for choice in ("auto", "required"):
        assert known.verdict(spec(name, tool_choice=choice), text) == "whole"
        assert known.verdict(spec(name, tool_choice=choice, parallel=False), text) == "refused"
        one = TOOL_FORMATS[name].write(CALLS[:1])
        assert known.verdict(spec(name, tool_choice=choice, parallel=False), one) == "whole"
        thought = spec(name, tool_choice=choice, reasoning=THINK)
        assert known.verdict(thought, f"<think>\nUse {{'get'}}.\n</think>\n\n{text}") == "whole"
        assert known.verdict(thought, text) == "whole"
        begun = spec(name, tool_choice=choice, reasoning=THINK, starts_in_reasoning=True)
        assert known.verdict(begun, f"\nHm\n</think>\n\n{text}") == "whole"


def parts_of(name: str) -> tuple[str, str]:
    """What stands before and behind the arguments of a call of `get`."""
    written = {"pythonic": "n=7", "qwen3_coder": "<parameter=n>\n7\n</parameter>"}.get(name, '{"n": 7}')
    before, _, behind = TOOL_FORMATS[name].write([ToolCall("get", '{"n": 7}')]).partition(written)
    return before, behind


@both_vocabularies
@every_format
def test_wrong_names_and_types_are_refused(name: str, markers: tuple[str, ...]) -> None:
    known = vocabulary(markers)
    required = spec(name, tool_choice="required")
    write = TOOL_FORMATS[name].write
    assert known.verdict(required, write([ToolCall("get", '{"n": 7}')])) == "whole"
    for call in (
        ToolCall("getter", '{"n": 7}'),
        ToolCall("get", '{"n": "7x"}'),
        ToolCall("get", "{}"),
        ToolCall("get_weather", '{"n": 7}'),
        ToolCall("get_weather", '{"city": "x", "unit": "K"}'),
        ToolCall("get_weather", '{"city": "x", "place": {"note": "y"}}'),
    ):
        assert known.verdict(required, write([call])) == "refused", call
    assert known.verdict(spec(name, tool_choice="required", allowed=("any-thing",)), write(CALLS[:1])) == "refused"
    assert known.verdict(required, "Hello") == "refused"
    assert not known.ends & set(known.allowed(known.matcher(required)))


@both_vocabularies
@every_format
def test_auto_leaves_text_alone(name: str, markers: tuple[str, ...]) -> None:
    known = vocabulary(markers)
    auto = spec(name)
    for text in ('Hello {"name": 1} [1, 2] <tool> \'é 日本', "", '{"na', "[g", "{", "[", "<|im_start|>x", "\n\n"):
        assert known.verdict(auto, text) == "whole", text
    hidden = {known.special[text] for text in auto.markers if text in known.special}
    forbidden = set(range(known.llguidance.vocab_size)) - set(known.allowed(known.matcher(auto)))
    # Apart from the markers, only tokens that are no beginning of a character; all of 256 bytes have their token.
    other = [token for token in forbidden - hidden if not known.llguidance.is_special_token(token)]
    assert all(known.llguidance.decode_bytes([token])[0] >= 0x80 for token in other)
    assert not known.ends & forbidden
    if not TOOL_FORMATS[name].only_at_start:
        text = TOOL_FORMATS[name].write(CALLS)
        assert known.verdict(auto, f"First this. {text}") == "whole"
        before, _ = parts_of(name)
        assert known.verdict(auto, f"First this. {before}x") == "refused"
        assert not known.ends & set(known.allowed(known_after(known, auto, before)))


def known_after(known: Vocabulary, auto: OutputSpec, text: str) -> llguidance.LLMatcher:
    matcher = known.matcher(auto)
    assert matcher.consume_tokens(known.encode(text))
    return matcher


def test_a_marker_spelled_out_begins_a_call_as_well() -> None:
    known = vocabulary(MARKERS)
    spelled = [token for letter in "<tool_call>" for token in known.encode(letter)]
    matcher = known.matcher(spec("hermes"))
    assert matcher.consume_tokens(spelled)
    assert matcher.try_consume_tokens(known.encode("hello")) == 0


@every_format
def test_text_with_a_grammar_or_calls(name: str) -> None:
    known = vocabulary(MARKERS)
    calls = TOOL_FORMATS[name].marked.write([ToolCall("get", '{"n": 7}')])
    for options, before in (({}, ""), ({"reasoning": THINK}, "<think>\nHm {\n</think>\n\n")):
        either = spec(name, content=JSON_CONTENT, **options)
        assert known.verdict(either, before + '{"q": "x"}') == "whole"
        assert known.verdict(either, before + calls) == "whole"
        assert known.verdict(either, before + '{"r": 1}') == "refused"
        assert known.verdict(either, before + "Hello") == "refused"
    assert known.verdict(spec(name, content=JSON_CONTENT, tool_choice="none"), calls) == "refused"
    assert known.verdict(OutputSpec(content=JSON_CONTENT), '{"q": "x"}') == "whole"


def test_without_anything_to_constrain_there_is_no_grammar() -> None:
    assert OutputSpec().grammar({}) is None
    assert OutputSpec(reasoning=THINK).grammar({}) is None
    assert spec("hermes", tool_choice="none").grammar({}) is None
    assert spec("hermes", allowed=()).grammar({}) is None


@both_vocabularies
@every_format
def test_what_masks_allow_is_read_as_calls_that_keep_to_their_schemas(name: str, markers: tuple[str, ...]) -> None:
    known = vocabulary(markers)
    random_ = random.Random(name)
    schemas = {tool.name: tool.parameters or {"type": "object"} for tool in TOOLS}
    ended, ways_out = 0, [known.encode(text) for text in WAYS_OUT]
    for choice, tools in (("required", TOOLS), ("required", (WEATHER,)), ("auto", (GET,)), ("required", (ANY,))) * 2:
        answer = spec(name, tool_choice=choice, tools=tools)
        token_ids, whole = walk(known.llguidance, known.matcher(answer), random_, ways_out, most=150)
        text = known.backend.decode(token_ids, skip_special_tokens=False)
        if "\ufffd" in text:  # a character cut at the limit, or bytes of one that is none
            continue
        got = read(answer, text)
        assert got == read(answer, *text)
        if choice == "required" and whole:
            ended += 1
            assert got.calls and not got.content, text
        for place, call in enumerate(got.calls):
            if whole or place < len(got.calls) - 1:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert ended


STRINGS = {
    "a": {"type": "string", "pattern": "^[a-c]{2,3}$"},
    "b": {"type": "string", "minLength": 2, "maxLength": 4},
    "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "d": {"type": ["integer", "null"], "minimum": 3},
    "e": {"const": "x/y"},
    "f": {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "hermes"])
@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        ({"a": "abc", "b": "xyz"}, "whole"),
        ({"a": "abcd", "b": "xyz"}, "refused"),
        ({"a": "ab", "b": "vwxyz"}, "refused"),
        ({"a": "ab", "b": "z"}, "refused"),
        ({"a": "ab", "b": "zz", "c": "é", "d": 5, "e": "x/y", "f": "red"}, "whole"),
        ({"a": "ab", "b": "zz", "f": None}, "whole"),
        ({"a": "ab", "b": "zz", "f": "reddish"}, "refused"),
        ({"a": "ab", "b": "zz", "d": 2}, "refused"),
        ({"a": "ab", "b": "zz", "e": "x"}, "refused"),
        ({"a": "ab", "c": "y"}, "refused"),
    ],
)
def test_constrained_parameters(name: str, arguments: Mapping[str, object], verdict: str) -> None:
    schema = {"properties": STRINGS, "required": ["a", "b"], "additionalProperties": False}
    tool = Tool("f", None, {**schema, "$defs": {"color": {"type": "string", "enum": ["red", "blue"]}}})
    # Where a schema has keywords that are not plain types, values are spelled as in JSON.
    text = TOOL_FORMATS[name].write([ToolCall("f", json.dumps(arguments, ensure_ascii=False))])
    if name == "pythonic":
        spelled = {
            key: "None" if one is None else json.dumps(one, ensure_ascii=False) for key, one in arguments.items()
        }
        pairs = ", ".join(f"{key}={value}" for key, value in spelled.items())
        text = f"[f({pairs})]"
    answer = spec(name, tools=(tool,), tool_choice="required")
    assert vocabulary(()).verdict(answer, text) == verdict
    if verdict == "whole":
        assert json.loads(read(answer, text).calls[0].arguments) == arguments


NUMBER = {"type": "integer"}


@pytest.mark.parametrize(
    ("names", "others", "verdict"),
    [
        (TOOL_FORMATS, {}, "refused"),
        (["hermes"], {"additionalProperties": NUMBER}, "whole"),
        (["hermes"], {"patternProperties": {"^b$": NUMBER}}, "whole"),
        (["hermes"], {"required": ["b"]}, "whole"),
        (["hermes"], {"allOf": [{"properties": {"b": NUMBER}}]}, "whole"),
    ],
)
def test_parameters_that_a_tool_does_not_list_are_refused_unless_its_schema_speaks_of_others(
    names: list[str], others: dict[str, object], verdict: str
) -> None:
    tool = Tool("f", None, {"properties": {"a": NUMBER}, **others})
    for name in names:
        text = TOOL_FORMATS[name].write([ToolCall("f", '{"a": 1, "b": 2}')])
        assert vocabulary(()).verdict(spec(name, tools=(tool,), tool_choice="required"), text) == verdict
        listed = TOOL_FORMATS[name].write([ToolCall("f", '{"a": 1}')])
        assert verdict == "whole" or vocabulary(()).verdict(spec(name, tools=(tool,)), listed) == "whole"


def test_a_value_in_tags_cannot_contain_its_closing_tag() -> None:
    inside = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    answer = spec("qwen3_coder", tool_choice="required")
    ending = "\n</parameter>\n</function>\n</tool_call>"
    assert vocabulary(()).verdict(answer, f"{inside}a\n</parameter>b{ending}") == "refused"
    assert vocabulary(()).verdict(answer, f"{inside}</parameter>{ending}") == "refused"
    assert vocabulary(()).verdict(answer, f"{inside}a</parameter>{ending}") == "whole"
    assert read(answer, f"{inside}a</parameter>{ending}") == Output(
        "", "", (ToolCall("get_weather", '{"city": "a</parameter>"}'),)
    )


@pytest.mark.parametrize(
    ("parameters", "strict", "message"),
    [
        ({"type": "array"}, False, "must be of type 'object'"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, True, "'anyOf'"),
        ({"type": "object", "properties": {"a>b": {}}}, False, "'a>b'"),
    ],
)
def test_schemas_that_a_format_cannot_keep_to_are_refused(
    parameters: dict[str, object], strict: bool, message: str
) -> None:
    tool = Tool("f", None, parameters, strict=strict)
    with pytest.raises(InvalidRequestError, match=message):
        spec("qwen3_coder", tools=(tool,)).grammar({})


def test_many_tools_and_parameters_compile_fast_enough() -> None:
    properties = {f"p{place}": {"type": "string"} for place in range(30)}
    tools = tuple(Tool(f"tool_{place}", None, {"properties": properties}) for place in range(10))
    for name in TOOL_FORMATS:
        vocabulary(()).matcher(spec(name, tools=tools))
