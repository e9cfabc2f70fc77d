"""Answers of real models in each format, whole, cut anywhere, cut short, and with things that only look like calls."""

from __future__ import annotations

import json

import pytest

from headway.errors import InvalidRequestError
from headway.structured.answer_formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format_for, tool_format_for
from headway.structured.answer_pieces import CallArguments, CallBegin, ContentPiece, ReasoningPiece
from headway.structured.answer_spec import AnswerSpec
from headway.structured.tool_schemas import Tool, ToolCall
from tests.unit.structured.answers import ANY, GET, TOOLS, WEATHER, Answer, cut, read

THINK = REASONING_FORMATS["think"]


def spec(name: str, **options: object) -> AnswerSpec:
    return AnswerSpec(tools=TOOLS, tool_format=TOOL_FORMATS[name], **options)  # type: ignore[arg-type]


PARIS = ToolCall("get_weather", '{"city": "Paris"}')
SEVEN = ToolCall("get", '{"n": 7}')
# format, what a model wrote, content, calls
ANSWERS = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [PARIS],
    ),
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
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
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
    ("mistral_args", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
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
    ("pythonic", "[get_weather(city='Paris')]", "", [PARIS]),
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
    assert whole == Answer("", content, tuple(calls))
    for call in whole.calls:
        json.loads(call.arguments)
    assert read(spec(name), *text) == whole
    for place in range(len(text)):
        assert read(spec(name), *cut(text, [place])) == whole


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_reasoning_comes_first(name: str, text: str, content: str, calls: list[ToolCall]) -> None:
    thought = f"<think>\nHm: {text}\n</think>\n\n{text}"
    wanted = Answer(f"Hm: {text}".strip(), content, tuple(calls))
    assert read(spec(name, reasoning=THINK), thought) == wanted
    assert read(spec(name, reasoning=THINK), *thought) == wanted
    in_prompt = thought.removeprefix("<think>")
    assert read(spec(name, reasoning=THINK, starts_in_reasoning=True), *in_prompt) == wanted


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_without_tools_all_is_content(name: str, text: str, content: str, calls: list[ToolCall]) -> None:
    assert read(spec(name, tool_choice="none"), text) == Answer("", text, ())
    assert spec(name, tool_choice="none").markers == ()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_cut_short_gives_what_there_is(name: str) -> None:
    text = TOOL_FORMATS[name].write([PARIS, SEVEN])
    whole = read(spec(name), text)
    assert whole.calls == (PARIS, SEVEN)
    longest = 0
    for end in range(len(text)):
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


def test_what_may_be_a_marker_is_held_back() -> None:
    parser = spec("hermes").parser()
    assert parser.feed("Look: <tool_c") == [ContentPiece("Look:")]
    assert parser.feed("at> <") == [ContentPiece(" <tool_cat>")]
    assert parser.finish() == [ContentPiece(" <")]


def test_arguments_are_streamed_as_they_come() -> None:
    parser = spec("hermes").parser()
    assert parser.feed('<tool_call>\n{"name": "get') == []
    assert parser.feed('_weather", "argu') == [CallBegin(0, "get_weather")]
    assert parser.feed('ments": {"city": "Pa') == [CallArguments(0, '{"city": "Pa')]
    assert parser.feed("ri") == [CallArguments(0, "ri")]
    assert parser.feed('s"}}\n</tool_call>') == [CallArguments(0, 's"}')]
    assert parser.finish() == []


def test_strings_in_tags_and_in_python_are_streamed_too() -> None:
    parser = spec("qwen3_coder").parser()
    assert parser.feed('<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ri\n</par') == [
        CallBegin(0, "get_weather"),
        CallArguments(0, '{"city": "Pa\\"ri'),
    ]
    assert parser.feed("ty>") == [CallArguments(0, "\\n</party>")]
    parser = spec("pythonic").parser()
    assert parser.feed("[get_weather(city='Pa\"ri") == [
        CallBegin(0, "get_weather"),
        CallArguments(0, '{"city": "Pa\\"ri'),
    ]


def test_a_name_that_may_not_be_called_is_content() -> None:
    text = '<tool_call>\n{"name": "get", "arguments": {"n": 7}}\n</tool_call>'
    assert read(spec("hermes", allowed=("get_weather",)), *text) == Answer("", text, ())


def test_one_call_only_if_not_parallel() -> None:
    text = TOOL_FORMATS["hermes"].write([PARIS, SEVEN])
    got = read(spec("hermes", parallel=False), *text)
    assert got.calls == (PARIS,)
    assert got.content == TOOL_FORMATS["hermes"].write([SEVEN])


def test_text_with_a_grammar_is_content_whatever_it_holds() -> None:
    text = '{"q": "<tool_call><function=get>"}'
    assert read(spec("qwen3_coder", content='start: "x"'), text) == Answer("", text, ())
    call = '{"name": "get", "parameters": {"n": 7}}'
    assert read(spec("llama3_json", content='start: "x"'), call) == Answer("", call, ())
    assert read(spec("llama3_json", content='start: "x"'), f"<|python_tag|>{call}") == Answer("", "", (SEVEN,))


def test_reasoning() -> None:
    plain = AnswerSpec(reasoning=THINK)
    assert read(plain, "<think>\nSo.\n\n</think>\n\nYes. \n") == Answer("So.", "Yes. \n", ())
    assert read(plain, "<think>\n\n</think>\n\nYes.") == Answer("", "Yes.", ())
    assert read(plain, "Yes <think>no</think>") == Answer("", "Yes <think>no</think>", ())
    assert read(plain, "  <thi") == Answer("", "  <thi", ())
    assert read(plain, "<think>So </th") == Answer("So </th", "", ())
    begun = AnswerSpec(reasoning=THINK, starts_in_reasoning=True)
    assert read(begun, "So.</think>Yes") == Answer("So.", "Yes", ())
    assert read(begun, "<think>So.</think>Yes") == Answer("So.", "Yes", ())
    parser = begun.parser()
    assert parser.feed("\nSo a <b") == [ReasoningPiece("So a <b")]
    mistral = AnswerSpec(reasoning=REASONING_FORMATS["mistral"])
    assert read(mistral, *"[THINK]So.[/THINK]Yes") == Answer("So.", "Yes", ())


def test_plain_text_goes_straight_through() -> None:
    parser = AnswerSpec().parser()
    assert parser.feed(" <tool_call>") == [ContentPiece(" <tool_call>")]
    assert parser.feed("") == []
    assert parser.finish() == []


def test_text_that_breaks_the_format_is_content() -> None:
    got = read(spec("hermes"), '<tool_call>\n{"name": "get", "arguments": {"n": 7}, "more": 1}\n</tool_call>')
    assert got == Answer("", ', "more": 1}\n</tool_call>', (SEVEN,))


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
        AnswerSpec(**{"tool_format": TOOL_FORMATS["hermes"], **options})  # type: ignore[arg-type]
    assert error.value.param == param


@pytest.mark.parametrize("arguments", ["[1]", "{", "x"])
def test_earlier_arguments_must_be_an_object_where_they_are_rewritten(arguments: str) -> None:
    with pytest.raises(InvalidRequestError):
        TOOL_FORMATS["pythonic"].write([ToolCall("f", arguments)])
