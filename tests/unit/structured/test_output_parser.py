"""Answers of real models in each format, whole, cut anywhere, cut short, and with things that only look like calls."""

from __future__ import annotations

import json

import pytest

from headway.errors import InvalidRequestError
from headway.structured.output_pieces import CallArguments, CallBegin, ContentPiece, Piece, ReasoningPiece
from headway.structured.output_spec import OutputSpec
from headway.structured.reasoning_formats import REASONING_FORMATS, reasoning_format_for
from headway.structured.tool_call_formats import TOOL_FORMATS, tool_format_for
from headway.structured.tool_schemas import Tool, ToolCall
from tests.unit.structured.outputs import ANY, GET, TOOLS, WEATHER, Output, cut, read

THINK = REASONING_FORMATS["think"]


def spec(name: str, **options: object) -> OutputSpec:
    return OutputSpec(tools=TOOLS, tool_format=TOOL_FORMATS[name], **options)  # type: ignore[arg-type]


PARIS = ToolCall("get_weather", '{"city": "Paris"}')
SEVEN = ToolCall("get", '{"n": 7}')
# format, what a model wrote, content, calls
ANSWERS = [
    (
        "hermes",
        'I\'ll look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name":"get","arguments":{"n": 7}}\n</tool_call>\nDone.',
        "I'll look.Done.",
        [PARIS, SEVEN],
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a</tool_call>}\\"b\\\\"}}</tool_call>',
        "",
        [ToolCall("get_weather", '{"city": "a</tool_call>}\\"b\\\\"}')],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get", "parameters": {"n": 7}}',
        "",
        [PARIS, SEVEN],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", 'Say {"name": "get", "parameters": {"n": 7}}', 'Say {"name": "get", "parameters": {"n": 7}}', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get", "arguments": {"n": 7}}]',
        "",
        [PARIS, SEVEN],
    ),
    ("mistral", 'Well.[TOOL_CALLS][{"name":"get", "arguments": {"n": 7}}]', "Well.", [SEVEN]),
    (
        "mistral_args",
        'Two: [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get[ARGS]{"n": 7}',
        "Two:",
        [PARIS, SEVEN],
    ),
    (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "Sure.",
        [PARIS],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nif a < b:\n\tprint("</parameter>")\n\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=place>\n{"lat": 1.5}\n</parameter>\n<parameter=exact>\nTrue\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get>\n<parameter=n>\n7\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [
            ToolCall(
                "get_weather",
                json.dumps(
                    {"city": 'if a < b:\n\tprint("</parameter>")\n', "days": 3, "place": {"lat": 1.5}, "exact": True}
                ),
            ),
            SEVEN,
        ],
    ),
    ("pythonic", '[get_weather(city="Paris"), get(n=7)]', "", [PARIS, SEVEN]),
    (
        "pythonic",
        "<|python_start|>[get_weather(city='L\\'Aquila \\u00e9\\x41\\n', place={'lat': -1.5e3, \"note\": ')]'}, "
        "tags=['a', \"b\",], exact=True), any-thing(x=None, y=(1, [false, {2: null}]))]<|python_end|>",
        "",
        [
            ToolCall(
                "get_weather",
                '{"city": "L\'Aquila \\u00e9\\u0041\\n", "place": {"lat": -1.5e3, "note": ")]"}, "tags": ["a", "b"], '
                '"exact": true}',
            ),
            ToolCall("any-thing", '{"x": null, "y": [1, [false, {"2": null}]]}'),
        ],
    ),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[getter(n=1)]", "[getter(n=1)]", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_what_models_write(name: str, text: str, content: str, calls: list[ToolCall]) -> None:
    whole = read(spec(name), text)
    assert whole == Output("", content, tuple(calls))
    for call in whole.calls:
        json.loads(call.arguments)
    assert read(spec(name), *text) == whole
    for place in range(len(text)):
        assert read(spec(name), *cut(text, [place])) == whole
    assert read(spec(name, tool_choice="none"), text) == Output("", text, ())
    thought = f"<think>\nHm: {text}\n</think>\n\n{text}"
    wanted = Output(f"Hm: {text}".strip(), content, tuple(calls))
    assert read(spec(name, reasoning=THINK), thought) == wanted
    assert read(spec(name, reasoning=THINK), *thought) == wanted
    in_prompt = thought.removeprefix("<think>")
    assert read(spec(name, reasoning=THINK, starts_in_reasoning=True), *in_prompt) == wanted


def test_without_tools_there_are_no_markers() -> None:
    assert not any(spec(name, tool_choice="none").markers for name in TOOL_FORMATS)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_cut_short_gives_what_there_is(name: str) -> None:
    text = TOOL_FORMATS[name].write([PARIS, SEVEN])
    whole = read(spec(name), text)
    assert whole.calls == (PARIS, SEVEN)
    longest = 0
    for end in range(0, len(text), 2):
        got = read(spec(name), text[:end])
        assert got == read(spec(name), *text[:end])
        for call, full in zip(got.calls, whole.calls):
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments)
        if got.calls:
            assert not got.content or not TOOL_FORMATS[name].is_list
        read_so_far = sum(len(call.arguments) for call in got.calls)
        assert read_so_far >= longest
        longest = read_so_far


IN_TAGS = '<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ri\n</par'
BEGINS = [CallBegin(0, "get_weather"), CallArguments(0, '{"city": "Pa\\"ri')]
BEGUN = OutputSpec(reasoning=THINK, starts_in_reasoning=True)
STREAMS: dict[str, tuple[OutputSpec, list[tuple[str, list[Piece]]]]] = {
    "what may be a marker is held back": (
        spec("hermes"),
        [
            ("Look: <tool_c", [ContentPiece("Look:")]),
            ("at> <", [ContentPiece(" <tool_cat>")]),
            ("", [ContentPiece(" <")]),
        ],
    ),
    "arguments": (
        spec("hermes"),
        [
            ('<tool_call>\n{"name": "get', []),
            ('_weather", "argu', [CallBegin(0, "get_weather")]),
            ('ments": {"city": "Pa', [CallArguments(0, '{"city": "Pa')]),
            ("ri", [CallArguments(0, "ri")]),
            ('s"}}\n</tool_call>', [CallArguments(0, 's"}')]),
            ("", []),
        ],
    ),
    "strings in tags": (
        spec("qwen3_coder"),
        [(IN_TAGS, BEGINS), ("ty>", [CallArguments(0, "\\n</party>")]), ("", [])],
    ),
    "strings in Python": (spec("pythonic"), [("[get_weather(city='Pa\"ri", BEGINS), ("", [])]),
    "reasoning": (BEGUN, [("\nSo a <b", [ReasoningPiece("So a <b")]), ("", [])]),
    "plain text": (OutputSpec(), [(" <tool_call>", [ContentPiece(" <tool_call>")]), ("", [])]),
}


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_known_is_streamed(name: str) -> None:
    """Each text with the pieces that are known behind it; the last ones are known at the end."""
    asked, steps = STREAMS[name]
    parser = asked.parser()
    assert parser.feed("") == []
    for text, pieces in steps[:-1]:
        assert parser.feed(text) == pieces
    assert parser.finish() == steps[-1][1]


GRAMMAR = 'start: "x"'
HERMES_SEVEN = TOOL_FORMATS["hermes"].write([SEVEN])
LLAMA_SEVEN = '{"name": "get", "parameters": {"n": 7}}'
MORE = '<tool_call>\n{"name": "get", "arguments": {"n": 7}, "more": 1}\n</tool_call>'
IN_TEXT = '{"q": "<tool_call><function=get>"}'
PLAIN = OutputSpec(reasoning=THINK)
MISTRAL = OutputSpec(reasoning=REASONING_FORMATS["mistral"])
READ: list[tuple[str, OutputSpec, str, Output]] = [
    ("a name not to be called", spec("hermes", allowed=("get_weather",)), HERMES_SEVEN, Output("", HERMES_SEVEN, ())),
    (
        "one call only",
        spec("hermes", parallel=False),
        TOOL_FORMATS["hermes"].write([PARIS, SEVEN]),
        Output("", HERMES_SEVEN, (PARIS,)),
    ),
    ("a grammar's text", spec("qwen3_coder", content=GRAMMAR), IN_TEXT, Output("", IN_TEXT, ())),
    ("a grammar's object", spec("llama3_json", content=GRAMMAR), LLAMA_SEVEN, Output("", LLAMA_SEVEN, ())),
    ("no text", spec("llama3_json", content=GRAMMAR), f"<|python_tag|>{LLAMA_SEVEN}", Output("", "", (SEVEN,))),
    ("a broken format", spec("hermes"), MORE, Output("", ', "more": 1}\n</tool_call>', (SEVEN,))),
    ("reasoning", PLAIN, "<think>\nSo.\n\n</think>\n\nYes. \n", Output("So.", "Yes. \n", ())),
    ("empty reasoning", PLAIN, "<think>\n\n</think>\n\nYes.", Output("", "Yes.", ())),
    ("reasoning too late", PLAIN, "Yes <think>no</think>", Output("", "Yes <think>no</think>", ())),
    ("half a marker", PLAIN, "  <thi", Output("", "  <thi", ())),
    ("half of the last marker", PLAIN, "<think>So </th", Output("So </th", "", ())),
    ("begun in the prompt", BEGUN, "So.</think>Yes", Output("So.", "Yes", ())),
    ("begun twice", BEGUN, "<think>So.</think>Yes", Output("So.", "Yes", ())),
    ("reasoning of Mistral", MISTRAL, "[THINK]So.[/THINK]Yes", Output("So.", "Yes", ())),
]


@pytest.mark.parametrize(("asked", "text", "answer"), [row[1:] for row in READ], ids=[row[0] for row in READ])
def test_what_is_read(asked: OutputSpec, text: str, answer: Output) -> None:
    assert read(asked, text) == read(asked, *text) == answer


TEMPLATES = [
    ("{{ messages }}", "hermes", None),
    (None, "hermes", None),
    ("<tool_call>\n{\"name\": <function-name>} ... content.split('</think>')", "hermes", "think"),
    ("<tool_call>\n<function=example>\n<parameter=p>", "qwen3_coder", None),
    ("{{ '[TOOL_CALLS] [' }} ... [/TOOL_RESULTS]", "mistral", None),
    ("[TOOL_CALLS]{{ name }}[ARGS] [THINK][/THINK]", "mistral_args", "mistral"),
    ("<|python_tag|> {{ '{\"name\": ' }}", "llama3_json", None),
    ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', "llama3_json", None),
    ("<|python_start|>[func_name1(params)]<|python_end|> <|python_tag|>", "pythonic", None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_templates_choose_formats(template: str | None, tools: str, reasoning: str | None) -> None:
    assert tool_format_for(template).name == tools
    found = reasoning_format_for(template)
    assert (found and found.name) == reasoning


def test_prompts_that_open_the_reasoning() -> None:
    assert THINK.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open_after("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_instructions_name_the_tools_and_the_form(name: str) -> None:
    text = TOOL_FORMATS[name].instructions([WEATHER, ANY])
    assert '"get_weather"' in text and '"any-thing"' in text and '"$defs"' in text
    assert TOOL_FORMATS[name].write([ToolCall("function-name", '{"parameter-name": "value"}')]) in text


def test_results() -> None:
    assert TOOL_FORMATS["hermes"].write_result("21") == "<tool_response>\n21\n</tool_response>"
    assert TOOL_FORMATS["llama3_json"].write_result("21") == "21"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": (Tool("a b"),)}, "tools"),
        ({"tools": (Tool(""),)}, "tools"),
        ({"tools": (GET, GET)}, "tools"),
        ({"tools": (GET,), "allowed": ("x",)}, "tool_choice"),
        ({"tools": (GET,), "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": (GET,), "tool_format": None}, "tools"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        OutputSpec(**{"tool_format": TOOL_FORMATS["hermes"], **options})  # type: ignore[arg-type]
    assert error.value.param == param


@pytest.mark.parametrize("arguments", ["[1]", "{", "x"])
def test_earlier_arguments_must_be_an_object_where_they_are_rewritten(arguments: str) -> None:
    with pytest.raises(InvalidRequestError):
        TOOL_FORMATS["pythonic"].write([ToolCall("f", arguments)])
