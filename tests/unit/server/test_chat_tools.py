"""Tools, structured answers and reasoning in /v1/chat/completions, with answers that the test writes down."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.sampling_params import SamplingParams
from headway.server.api import jobs
from headway.server.server_config import ServerConfig
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway.tokenizer import Tokenizer
from headway.wire.messages import Delta
from tests.unit.server.fake_engine import (
    CHAT_TEMPLATE,
    HI,
    FakeEngine,
    FakeServer,
    engine_ready,
    events,
    run,
    tokenizer_with,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TEXT = {"type": "text", "text": "21"}
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


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_a_template_that_knows_tools_gets_them() -> None:
    server = server_with('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', template=TOOL_TEMPLATE)
    messages = talk(call(), call("weather", '{"city": "Oslo"}', "call_2"), reasoning_content="Hm.")
    assert server.chat(messages=messages, tools=[WEATHER, function("clock", strict=True)]).status_code == 200
    head, *lines = prompt_of(server).splitlines()
    clock = {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(head.removeprefix("TOOLS ")) == [WEATHER, {"type": "function", "function": clock}]
    assert lines == [
        "[user]Hot?",
        "[assistant](call_1 weather Rome)(call_2 weather Oslo)thought Hm.",
        "[tool]21 °Cfor call_1",
        "[tool]21 °Cfor call_2",
    ]
    answer = server.chat(tools=[WEATHER], tool_choice="none").json()
    assert prompt_of(server) == "[user]Hi\n", "no tools are shown if none may be called"
    assert answer["choices"][0]["message"]["content"].startswith("<tool_call>")
    tokens = server.send("/tokenize", prompt=None, messages=HI, tools=[WEATHER]).json()["tokens"]
    server.chat(tools=[WEATHER])
    assert tokens == server.engine.requests[-1].prompt_token_ids


def test_tools_and_calls_are_written_where_the_template_knows_none() -> None:
    server = server_with(tool_format="mistral")
    server.chat(messages=talk(call(), content="Let me see."), tools=[WEATHER])
    prompt = prompt_of(server)
    assert prompt.startswith("<|im_start|>system") and '"description": "Says it."' in prompt.partition("<|im_end|>")[0]
    assert "assistant\nLet me see.\n[TOOL_CALLS]" in prompt
    server.chat(messages=talk(call(arguments="")), tools=[CLOCK], tool_choice="none")
    assert "[TOOL_CALLS]" in prompt_of(server) and "system" not in prompt_of(server)


def test_templates_that_want_ids_of_nine_letters_get_them() -> None:
    server = server_with(template=TOOL_TEMPLATE + "{# id|length != 9 #}")
    server.chat(messages=talk(call(), call(call_id="abcdefgh9")))
    prompt = prompt_of(server)
    (first, second), results = re.findall(r"\((\w+) weather", prompt), re.findall(r"for (\w+)", prompt)
    assert [first, second] == results
    assert (len(first), second) == (9, "abcdefgh9")


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


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PIECES = ("<thi", "nk>Hm, < or </ or", " what?</think>One", " moment. <tool_", *CALL.removeprefix("<tool_"))


def test_a_streamed_answer_is_the_whole_one() -> None:
    server = server_with(*PIECES, reasoning_format="think")
    fields = {"tools": [WEATHER, CLOCK], "logprobs": True, "top_logprobs": 1, "n": 2}
    whole = as_streamed(server.chat(**fields).json())
    streamed = put_together(events(server.chat(**fields, stream=True)))
    assert [len(choice.pop("logprobs")) for choice in streamed] == [len(PIECES)] * 2
    for choice in whole:
        choice.pop("logprobs")
    assert streamed == whole
    assert [choice["calls"] for choice in whole] == [[["weather", '{"city": "Rome"}']]] * 2
    assert (whole[0]["content"], whole[0]["reasoning"]) == ("One moment.", "Hm, < or </ or what?")
    assert whole[0]["finish_reason"] == "tool_calls"


def test_a_call_has_openais_form_whole_and_streamed_and_can_be_sent_back() -> None:
    server = server_with("<think>Hm.</think>", CALL[:50], CALL[50:55], CALL[55:], reasoning_format="think")
    answer = server.chat(tools=[WEATHER]).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": [TEXT]}
    again = server.chat(messages=[*HI, choice["message"], result], tools=[WEATHER])
    assert again.status_code == 200, again.text
    assert TOOL_FORMATS["hermes"].write_result("21") in prompt_of(server)
    (made,) = choice["message"].pop("tool_calls")
    thoughts = {"reasoning_content": "Hm.", "reasoning": "Hm."}
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, **thoughts}
    assert re.fullmatch("call_[0-9a-f]{24}", made.pop("id"))
    assert made == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

    chunks = events(server.chat(tools=[WEATHER], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    ((begin,), *more) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert begin.pop("id").startswith("call_")
    assert begin == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert all(list(each) == ["index", "function"] and list(each["function"]) == ["arguments"] for (each,) in more)
    assert len(more) > 1, "arguments come as they are made"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "tool_calls"]


def test_a_call_that_was_cut_off_ends_with_length() -> None:
    server = server_with(CALL[:55], CALL[55:65], CALL[65:])
    for stream in (False, True):
        response = server.chat(tools=[WEATHER], max_tokens=1, stream=stream)
        (choice,) = put_together(events(response)) if stream else as_streamed(response.json())
        assert choice["finish_reason"] == "length"
        assert choice["calls"] == [["weather", CALL[CALL.index('{"city') : 55]]]


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
    server = server_with("On and", " on", " and", template=THINK_TEMPLATE)
    message = server.chat(reasoning_effort="none").json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "On and on and", "refusal": None}
    assert prompt_of(server).endswith("</think>\n\n")
    choice = server.chat(max_tokens=2).json()["choices"][0]
    thoughts = {"reasoning_content": "On and on", "reasoning": "On and on"}
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None, **thoughts}
    assert choice["finish_reason"] == "length"


def test_formats_can_be_chosen() -> None:
    raw = server_with("a</think>b", template=THINK_TEMPLATE, reasoning_format="none").chat(tools=[WEATHER]).json()
    assert raw["choices"][0]["message"] == {"role": "assistant", "content": "a</think>b", "refusal": None}
    assert "completion_tokens_details" not in raw["usage"]
    other = server_with("[THINK]a[/THINK]b", reasoning_format="mistral").chat().json()["choices"][0]["message"]
    assert (other["reasoning"], other["content"]) == ("a", "b")
    for options in ({"tool_format": "hermez"}, {"reasoning_format": "hermez"}, {"tool_format": "none"}):
        with pytest.raises(ConfigError, match=next(iter(options.values()))):
            ServerConfig(**options)


def test_openais_client_parses_a_streamed_answer_into_models(constraints: list[Any]) -> None:
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    weather = pydantic.create_model("weather", city=(str, ...))
    point = pydantic.create_model("Point", x=(int, ...), y=(int | None, None))

    async def stream(*words: str, **fields: Any) -> Any:
        server = server_with(*words, reasoning_format="think")
        client = openai.AsyncOpenAI(
            api_key="x", base_url="http://127.0.0.1/v1", http_client=server.client(), max_retries=0
        )
        usage = {"include_usage": True}
        async with client.chat.completions.stream(model="small", messages=HI, stream_options=usage, **fields) as events:
            async for _ in events:
                pass
            return await events.get_final_completion()

    parsed = run(stream('{"x": ', "5", ', "y": null}', response_format=point))
    assert parsed.choices[0].message.parsed == point(x=5)
    ((values, _),) = constraints
    assert list(values["json"]["properties"]) == ["x", "y"]
    words = ("<think>Hm", ".</think>", "Well. ", CALL[:50], CALL[50:55], CALL[55:], "\n", CALL)
    completion = run(stream(*words, tools=[openai.pydantic_function_tool(weather)]))
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert [each.function.parsed_arguments for each in choice.message.tool_calls] == [weather(city="Rome")] * 2
    assert (choice.message.content, choice.message.reasoning_content) == ("Well.", "Hm.")
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2
