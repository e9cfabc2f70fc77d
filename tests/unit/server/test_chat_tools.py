"""Tools, structured answers and reasoning in /v1/chat/completions, with answers that the test writes down."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import msgspec
import pytest

from headway.errors import ConfigError
from headway.rpc.messages import Delta
from headway.sampling_params import SamplingParams
from headway.server.api import jobs
from headway.server.api.answer_requests import MAX_TOOLS
from headway.server.api.openapi import document
from headway.server.server_config import ServerConfig
from headway.structured.answer_formats import TOOL_FORMATS
from headway.structured.tool_schemas import MAX_NESTING, ToolCall
from headway.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.unit.server.fake_engine import CHAT_TEMPLATE, FakeEngine, FakeServer, engine_ready, events, run
from tests.unit.tokenizer.small import byte_level_metadata

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "schema": SCHEMA, "strict": True}}
SPACE = "disable_any_whitespace"
SPACED = {"json": SCHEMA, SPACE: True}
TOOL_TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
    "{% if m.tool_call_id %}for {{ m.tool_call_id }}{% endif %}{% if m.reasoning_content %}thought "
    "{{ m.reasoning_content }}{% endif %}{{ '\n' }}{% endfor %}"
)
THINK_TEMPLATE = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


@pytest.fixture(autouse=True)
def constraints(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], str]]:
    """What answers must match, and the field that says so."""
    seen: list[tuple[dict[str, Any], str]] = []
    checked = jobs._with_structured_outputs

    def note(params: SamplingParams, values: dict[str, Any], *, path: str) -> SamplingParams:
        seen.append((values, path))
        return checked(params, values, path=path)

    monkeypatch.setattr(jobs, "_with_structured_outputs", note)
    return seen


@functools.cache
def tokenizer_with(template: str) -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(pre="gpt-2", **{"tokenizer.chat_template": template}))


def server_with(*words: str, template: str = CHAT_TEMPLATE, **options: Any) -> FakeServer:
    server = FakeServer(FakeEngine(words=words or ("Hello",)), tokenizer=tokenizer_with(template), **options)
    server.engine.info = engine_ready(max_model_len=100_000)
    return server


def prompt_of(server: FakeServer) -> str:
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def call(name: str = "weather", arguments: str = '{"city": "Rome"}', call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(*calls: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Hot?"},
        {"role": "assistant", "content": None, "tool_calls": list(calls), **more},
        *({"role": "tool", "tool_call_id": each["id"], "content": "21 °C"} for each in calls),
    ]


# ---- requests -------------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def as_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        *(({"tools": [function(name)]}, "tools[0].function.name") for name in ("", "a b", "x" * 129)),
        ({"tools": [WEATHER, CLOCK, WEATHER]}, "tools[2].function.name"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(parameters={"required": True})]}, "tools[0].function.parameters.required"),
        ({"tools": [function(parameters={"properties": 5})]}, "tools[0].function.parameters.properties"),
        ({"tools": [function(parameters=nested(MAX_NESTING))]}, "tools[0].function.parameters"),
        ({"tools": [function(paramters={})]}, "tools[0].function.paramters"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [function(description="x" * 2**21)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": function("weather")}, "tool_choice"),
        ({"tool_choice": function("weather"), "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "custom"}, "tools": [CLOCK]}, "tool_choice.type"),
        ({"tool_choice": allowed("auto"), "tools": [CLOCK]}, "tool_choice.allowed_tools.tools"),
        (
            {"tool_choice": allowed("auto", function("x")), "tools": [CLOCK]},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"parallel_tool_calls": 2}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": JSON_SCHEMA | {"json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": JSON_SCHEMA | {"type": "text"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
        (as_schema([1]), "response_format.json_schema.schema"),
        (as_schema(nested(MAX_NESTING)), "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", SPACE: True}}, f"structured_outputs.{SPACE}"),
        ({"structured_outputs": {"json": nested(MAX_NESTING)}}, "structured_outputs.json"),
        *(
            ({"structured_outputs": {"json": text}, "tools": [CLOCK]}, "structured_outputs.json")
            for text in ("{", "5", '{"not":' * 5000)
        ),
        ({"structured_outputs": {"grammar": "root ::= ("}, "tools": [CLOCK]}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a"}, "response_format": JSON_SCHEMA}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "a"}, "guided_grammar"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"chat_template_kwargs": nested(MAX_NESTING)}, "chat_template_kwargs"),
        ({"response_format": JSON_SCHEMA, "use_beam_search": True, "n": 2}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2}, "structured_outputs"),
        ({"tools": [CLOCK], "use_beam_search": True, "n": 2}, "tools"),
        *(
            ({"messages": [message]}, f"messages[0].{field}")
            for message, field in (
                ({"role": "tool", "content": "x"}, "tool_call_id"),
                ({"role": "tool", "tool_call_id": "a"}, "content"),
                ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
                ({"role": "user", "content": "x", "tool_calls": [call()]}, "tool_calls"),
                ({"role": "user", "content": "x", "reasoning": "y"}, "reasoning"),
                ({"role": "function", "content": "x", "name": "f"}, "role"),
                ({"role": "assistant", "content": None}, "content"),
                ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}, "function_call"),
            )
        ),
        ({"messages": talk({"id": "a", "function": {"name": "f"}})}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": talk(*[call()] * 9000)}, "messages"),
    ],
)
def test_what_is_wrong_is_400_with_its_path(fields: dict[str, Any], param: str) -> None:
    server = server_with()
    response = server.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    assert param in error["message"]
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"guided_json": {}}, "structured_outputs.json"),
        ({"functions": [{"name": "f"}]}, "'tools'"),
        ({"function_call": "auto"}, "'tool_choice'"),
    ],
)
def test_older_spellings_are_told_the_new_one(old: dict[str, Any], new: str) -> None:
    error = server_with().chat(**old).json()["error"]
    assert new in error["message"] and error["code"] == "unsupported_field"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"functions": [], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "assistant", "content": None, "reasoning": "Hm."}, {"role": "user", "content": "So?"}]},
        {"structured_outputs": None, "guided_json": None},
    ],
)
def test_what_asks_for_nothing_is_harmless(fields: dict[str, Any], constraints: list[Any]) -> None:
    response = server_with().chat(**fields)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert not constraints


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_a_template_that_knows_tools_gets_them() -> None:
    server = server_with(template=TOOL_TEMPLATE)
    messages = talk(call(), call("weather", '{"city": "Oslo"}', "call_2"), reasoning_content="Hm.")
    assert server.chat(messages=messages, tools=[WEATHER, CLOCK]).status_code == 200
    head, *lines = prompt_of(server).splitlines()
    clock = {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(head.removeprefix("TOOLS ")) == [WEATHER, {"type": "function", "function": clock}]
    assert lines == [
        "[user]Hot?",
        "[assistant](call_1 weather Rome)(call_2 weather Oslo)thought Hm.",
        "[tool]21 °Cfor call_1",
        "[tool]21 °Cfor call_2",
    ]


def test_strict_is_no_part_of_the_prompt() -> None:
    server = server_with(template=TOOL_TEMPLATE)
    server.chat(tools=[function(strict=True)])
    assert "strict" not in prompt_of(server)


def test_tools_are_written_where_the_template_knows_none() -> None:
    server = server_with()
    form = TOOL_FORMATS["hermes"]
    messages = [{"role": "system", "content": "Be brief."}, *talk(call(), call(call_id="call_2"))]
    assert server.chat(messages=messages, tools=[WEATHER]).status_code == 200
    prompt = prompt_of(server)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '"description": "Says it."' in prompt.partition("<|im_end|>")[0]
    written = form.write([ToolCall("weather", '{"city": "Rome"}')] * 2)
    result = form.write_result("21 °C")
    assert f"<|im_start|>assistant\n{written}<|im_end|>\n" in prompt
    assert f"<|im_start|>user\n{result}\n{result}<|im_end|>\n" in prompt


def test_calls_are_written_behind_their_text_and_without_tools_too() -> None:
    server = server_with(tool_format="mistral")
    server.chat(messages=talk(call(arguments=""), content="Let me see."), tools=[CLOCK], tool_choice="none")
    prompt = prompt_of(server)
    assert "assistant\nLet me see.\n[TOOL_CALLS]" in prompt
    assert "system" not in prompt


def test_no_tools_are_shown_if_none_may_be_called() -> None:
    server = server_with('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', template=TOOL_TEMPLATE)
    answer = server.chat(tools=[WEATHER], tool_choice="none").json()
    assert prompt_of(server) == "[user]Hi\n"
    assert answer["choices"][0]["message"]["content"].startswith("<tool_call>")


def test_templates_that_want_ids_of_nine_letters_get_them() -> None:
    server = server_with(template=TOOL_TEMPLATE + "{# id|length != 9 #}")
    server.chat(messages=talk(call(), call(call_id="abcdefgh9")))
    prompt = prompt_of(server)
    (first, second), results = re.findall(r"\((\w+) weather", prompt), re.findall(r"for (\w+)", prompt)
    assert [first, second] == results
    assert (len(first), second) == (9, "abcdefgh9")


def test_tokenize_counts_tools() -> None:
    server = server_with(template=TOOL_TEMPLATE)
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
    tokens = server.post("/tokenize", body).json()["tokens"]
    server.chat(tools=[WEATHER])
    assert tokens == server.engine.requests[0].prompt_token_ids
    error = server.post("/tokenize", body | {"tools": [{"function": {"name": "?"}}]}).json()["error"]
    assert error["param"] == "tools[0].function.name"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "None None"),
        ({"reasoning_effort": "none"}, "none False"),
        ({"reasoning_effort": "low"}, "low True"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low False"),
    ],
)
def test_effort_reaches_a_template_that_knows_it(fields: dict[str, Any], shown: str) -> None:
    server = server_with(
        template="{{ reasoning_effort or None }} {{ enable_thinking if enable_thinking is defined else None }}"
    )
    server.chat(**fields)
    assert prompt_of(server) == shown


# ---- what is constrained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": JSON_SCHEMA}, ({"json": SCHEMA}, "response_format.json_schema.schema")),
        ({"response_format": {"type": "json_object"}}, ({"json_object": True}, "response_format")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ({"json": SCHEMA}, "response_format.schema")),
        ({"structured_outputs": {"regex": "a+"}}, ({"regex": "a+"}, "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ({"choice": ["a", "b"]}, "structured_outputs.choice")),
        ({"structured_outputs": SPACED}, (SPACED, "structured_outputs.json")),
        (
            {"response_format": JSON_SCHEMA, "tool_choice": "none", "tools": [CLOCK]},
            ({"json": SCHEMA}, "response_format.json_schema.schema"),
        ),
    ],
)
def test_the_form_of_a_text_reaches_the_engine(fields: dict[str, Any], expected: Any, constraints: list[Any]) -> None:
    server = server_with()
    assert server.chat(**fields).status_code == 200
    assert server.chat(**fields, stream=True).status_code == 200
    assert constraints == [expected] * 2
    constraints.clear()
    fields = {name: value for name, value in fields.items() if "tool" not in name}
    assert server.complete(**fields).status_code == 200
    assert constraints == [expected]


def grammar_for(constraints: list[Any], server: FakeServer | None = None, **fields: Any) -> str:
    server = server or server_with()
    assert server.chat(**fields).status_code == 200
    _, path = constraints[-1]
    constraints.clear()
    other = [name for name in ("response_format", "structured_outputs") if name in fields]
    assert path.startswith(other[0] if other else "tools")
    params = server.engine.requests[-1].params
    assert params is not None
    return str(params.grammar)


def test_tools_are_a_grammar_and_text_is_part_of_it(constraints: list[Any]) -> None:
    def grammar(**fields: Any) -> str:
        return grammar_for(constraints, tools=[WEATHER, CLOCK], **fields)

    free, required = grammar(), grammar(tool_choice="required")
    assert "weather" in free and "clock" in free and required != free
    named = grammar(tool_choice=function("clock"))
    some = grammar(tool_choice=allowed("required", function("clock")))
    assert "weather" not in named + some and named != some, "a named tool is called once"
    assert grammar(tool_choice=allowed("auto", function("clock"))) != some
    assert grammar(tool_choice="required", parallel_tool_calls=False) != required
    assert json.dumps(SCHEMA["properties"]) in grammar(response_format=JSON_SCHEMA)


@pytest.mark.parametrize(
    ("structured", "content"),
    [
        ({"json": SCHEMA}, json.dumps(SCHEMA["properties"])),
        ({"json": json.dumps(SCHEMA)}, json.dumps(SCHEMA["properties"])),
        ({"json_object": True}, 'start: %json {"type": "object"'),
        ({"choice": ["a", '"b"\n']}, r'start: "a" | "\"b\"\n"'),
        ({"regex": r"a/b\/c\\/d"}, r"start: /a\/b\/c\\\/d/"),
        ({"regex": "a\nb"}, r"start: /a\nb/"),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
    ],
)
def test_any_form_of_a_text_goes_with_thoughts(
    structured: dict[str, Any], content: str, constraints: list[Any]
) -> None:
    server = server_with(template=THINK_TEMPLATE)
    assert content in grammar_for(constraints, server, structured_outputs=structured)


def test_markers_that_are_special_tokens_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "marker_token_id", lambda self, text: 5 if text == "<think>" else None)
    for name, shows in (("none", False), ("think", True)):
        server = server_with(reasoning_format=name)
        server.chat()
        assert server.engine.requests[0].params == SamplingParams(max_tokens=None, skip_special_tokens=not shows)


def test_errors_of_the_engines_records_name_the_field_that_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    error = server_with().chat(structured_outputs={"choice": []}).json()["error"]
    assert error["param"] == "structured_outputs.choice"


@pytest.mark.parametrize(
    ("fields", "named", "param"),
    [
        ({"response_format": JSON_SCHEMA}, "structured_outputs.json.a", "response_format.json_schema.schema.a"),
        ({"response_format": JSON_SCHEMA}, "structured_outputs", "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.other", "structured_outputs.other"),
        ({"tools": [CLOCK]}, "structured_outputs.grammar", "tools"),
        ({"tools": [CLOCK]}, "seed", "seed"),
    ],
)
def test_so_do_errors_of_the_engine(fields: dict[str, Any], named: str, param: str) -> None:
    server = server_with()
    engine, odd = server.engine, {"error": f"{named} is odd", "error_status": 400, "error_param": named}
    engine._answer = lambda request: engine.push(  # type: ignore[method-assign]
        Delta(request.request_id, finish_reason="error", is_last=True, **odd)
    )
    response = server.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param} is odd")


# ---- answers --------------------------------------------------------------------------------------------------------


def put_together(chunks: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream, as a whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"content": "", "reasoning": "", "calls": [], "logprobs": []})
            delta = part["delta"]
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            choice["logprobs"] += (part["logprobs"] or {}).get("content", [])
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["type"] == "function" and piece["index"] == len(choice["calls"])
                    choice["calls"].append([piece["function"]["name"], ""])
                choice["calls"][piece["index"]][1] += piece["function"]["arguments"]
            choice["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def as_streamed(answer: Any) -> list[dict[str, Any]]:
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"].get("reasoning_content", ""),
            "calls": [
                [each["function"]["name"], each["function"]["arguments"]]
                for each in choice["message"].get("tool_calls", ())
            ],
            "logprobs": (choice["logprobs"] or {}).get("content", []),
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


def cut(text: str, rng: random.Random) -> tuple[str, ...]:
    places = sorted(rng.sample(range(1, len(text)), rng.randrange(min(24, len(text) - 1))))
    return tuple(text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True))


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_streamed_and_whole_answers_are_the_same_however_they_are_cut(name: str) -> None:
    rng = random.Random(17)
    calls = [ToolCall("weather", '{"city": "Rome \\"x\\" <b>"}'), ToolCall("clock", "{}")]
    text = TOOL_FORMATS[name].write(calls)
    if not TOOL_FORMATS[name].only_at_start:
        text = "One moment. " + text
    for thinks in (False, True):
        shown = f"<think>Hm, < or </ or what?</think>{text}" if thinks else text
        fields = {"tools": [WEATHER, CLOCK], "logprobs": True, "top_logprobs": 1, "n": 2}
        options = {"tool_format": name, "reasoning_format": "think"}
        whole = server_with(shown, **options).chat(**fields).json()
        expected = as_streamed(whole)
        for choice in expected:
            assert [[each, json.loads(arguments)] for each, arguments in choice["calls"]] == [
                [each.name, json.loads(each.arguments)] for each in calls
            ]
            assert choice["reasoning"] == ("Hm, < or </ or what?" if thinks else "")
            assert choice["finish_reason"] == "tool_calls"
            assert choice["content"].strip() == ("" if TOOL_FORMATS[name].only_at_start else "One moment.")
        for _ in range(5):
            words = cut(shown, rng)
            server = server_with(*words, **options)
            streamed = put_together(events(server.chat(**fields, stream=True)))
            assert [len(choice.pop("logprobs")) for choice in streamed] == [len(words)] * 2
            without = [{key: value for key, value in choice.items() if key != "logprobs"} for choice in expected]
            assert streamed == without
            assert as_streamed(server.chat(**fields).json())[0]["calls"] == expected[0]["calls"]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_a_call_has_openais_form() -> None:
    answer = server_with(CALL).chat(tools=[WEATHER]).json()
    (choice,) = answer["choices"]
    (made,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert re.fullmatch("call_[0-9a-f]{24}", made.pop("id"))
    assert made == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert choice["finish_reason"] == "tool_calls"
    assert "completion_tokens_details" not in answer["usage"]


def test_the_chunks_of_a_call_have_openais_form() -> None:
    words = ("Well. ", '<tool_call>\n{"name": "weather", "arguments": {"ci', 'ty": "Rome"}}', "\n</tool_call>")
    chunks = events(server_with(*words).chat(tools=[WEATHER], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    ((begin,), *more) = calls
    assert begin.pop("id").startswith("call_")
    assert begin == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert all(list(each) == ["index", "function"] and list(each["function"]) == ["arguments"] for (each,) in more)
    assert len(more) > 1, "arguments come as they are made"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "tool_calls"]


def test_a_call_that_was_cut_off_ends_with_length() -> None:
    words = ('<tool_call>\n{"name": "weather", "arguments": {"ci', 'ty": "Ro', 'me"}}</tool_call>')
    for stream in (False, True):
        response = server_with(*words).chat(tools=[WEATHER], max_tokens=2, stream=stream)
        (choice,) = put_together(events(response)) if stream else as_streamed(response.json())
        assert choice["finish_reason"] == "length"
        assert choice["calls"] == [["weather", '{"city": "Ro']]


def test_free_text_next_to_tools_is_content() -> None:
    answer = server_with("Just ", "text.").chat(tools=[WEATHER]).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Just text.", "stop")
    assert "tool_calls" not in answer["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_set_apart_and_counted(stream: bool) -> None:
    server = server_with("Let ", "me", " think", "</think>", "\n\n", "Yes", ".", template=THINK_TEMPLATE)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = server.chat(**options)
    if stream:
        *chunks, last = events(response)
        (choice,), usage = put_together(chunks), last["usage"]
    else:
        (choice,), usage = as_streamed(response.json()), response.json()["usage"]
        assert response.json()["choices"][0]["message"]["reasoning"] == choice["reasoning"]
    assert (choice["reasoning"], choice["content"], choice["finish_reason"]) == ("Let me think", "Yes.", "stop")
    assert usage["completion_tokens"] == 7
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_a_prompt_that_ends_the_thinking_is_seen_and_thinking_that_never_ends_is_no_content() -> None:
    server = server_with("Yes.", template=THINK_TEMPLATE)
    message = server.chat(reasoning_effort="none").json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert prompt_of(server).endswith("</think>\n\n")
    choice = server_with("On and", " on", " and", template=THINK_TEMPLATE).chat(max_tokens=2).json()["choices"][0]
    thoughts = {"reasoning_content": "On and on", "reasoning": "On and on"}
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None, **thoughts}
    assert choice["finish_reason"] == "length"


def test_formats_can_be_chosen() -> None:
    raw = server_with("a</think>b", template=THINK_TEMPLATE, reasoning_format="none").chat().json()
    assert raw["choices"][0]["message"] == {"role": "assistant", "content": "a</think>b", "refusal": None}
    other = server_with("[THINK]a[/THINK]b", reasoning_format="mistral").chat().json()["choices"][0]["message"]
    assert (other["reasoning"], other["content"]) == ("a", "b")
    for name in ("tool_format", "reasoning_format"):
        with pytest.raises(ConfigError, match="hermez"):
            ServerConfig(**{name: "hermez"})
    with pytest.raises(ConfigError):
        ServerConfig(tool_format="none")


def test_what_was_answered_can_be_sent_back() -> None:
    server = server_with("<think>Hm.</think>", CALL, reasoning_format="think")
    message = server.chat(tools=[WEATHER]).json()["choices"][0]["message"]
    parts = [{"type": "text", "text": "21"}]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": parts}
    again = server.chat(messages=[{"role": "user", "content": "Hot?"}, message, result], tools=[WEATHER])
    assert again.status_code == 200, again.text
    assert TOOL_FORMATS["hermes"].write_result("21") in prompt_of(server)


def test_the_document_has_the_records() -> None:
    schemas = document()["components"]["schemas"]
    assert {"ToolDefinition", "ResponseFormat", "StructuredOutputs", "AnswerToolCall"} <= set(schemas)
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert "structured_outputs.json" in fields["guided_json"]["description"]
    assert "tools" in fields["functions"]["description"]
    assert msgspec.json.encode(document())


# ---- OpenAI's client ------------------------------------------------------------------------------------------------


def openai_client(server: FakeServer) -> Any:
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1/v1", http_client=server.client(), max_retries=0)


def test_openais_client_parses_answers_into_models(constraints: list[Any]) -> None:
    pydantic = pytest.importorskip("pydantic")
    point = pydantic.create_model("Point", x=(int, ...), y=(int | None, None))
    client = openai_client(server_with('{"x": ', "5", ', "y": null}'))

    async def parse() -> Any:
        return await client.chat.completions.parse(
            model="small", messages=[{"role": "user", "content": "Hi"}], response_format=point
        )

    assert run(parse()).choices[0].message.parsed == point(x=5)
    ((values, _),) = constraints
    assert list(values["json"]["properties"]) == ["x", "y"]


def test_openais_client_puts_streamed_calls_together() -> None:
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    weather = pydantic.create_model("weather", city=(str, ...))
    words = ("<think>Hm", ".</think>", "Well. ", CALL[:50], CALL[50:55], CALL[55:], "\n", CALL)
    client = openai_client(server_with(*words, reasoning_format="think"))

    async def stream() -> Any:
        async with client.chat.completions.stream(
            model="small",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[openai.pydantic_function_tool(weather)],
            tool_choice="auto",
            stream_options={"include_usage": True},
        ) as events:
            async for _ in events:
                pass
            return await events.get_final_completion()

    completion = run(stream())
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert [each.function.parsed_arguments for each in choice.message.tool_calls] == [weather(city="Rome")] * 2
    assert choice.message.content == "Well."
    assert choice.message.reasoning_content == "Hm."
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2
