"""Requests as agents and libraries send them: taken, or refused in the words of the client, at all three APIs."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from headway.server.api import api_translation, jobs
from headway.server.api.api_errors import bad_request
from headway.server.api.messages_api import MESSAGES_NAMES
from headway.server.api.responses_api import RESPONSES_NAMES
from tests.unit.server.fake_engine import (
    CHAT,
    CHAT_TEMPLATE,
    COMPLETIONS,
    HI,
    MESSAGES,
    RESPONSES,
    FakeEngine,
    FakeServer,
    engine_ready,
    tokenizer_with,
)

OBJECT = {"type": "object"}
FUNCTION = {"type": "function", "name": "add", "parameters": OBJECT}
NAMESPACE = {"type": "namespace", "name": "mcp__mail", "description": "Mail.", "tools": [FUNCTION]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
OURS = {"name": "add", "input_schema": OBJECT}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CUT = '{"a": "b'
EPHEMERAL = {"type": "ephemeral"}


def server_with(*words: str, template: str = CHAT_TEMPLATE) -> FakeServer:
    server = FakeServer(FakeEngine(words=words or ("Hello", " world", ".")), tokenizer=tokenizer_with(template))
    server.engine.info = engine_ready(max_model_len=4096)
    return server


def send(path: str, server: FakeServer | None = None, **fields: Any) -> httpx.Response:
    return (server or server_with()).send(path, **fields)


def chat_history(arguments: str, content: Any = None) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    return {"messages": [*HI, turn, {"role": "tool", "tool_call_id": "c", "content": "7"}]}


def response_history(*items: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "Hi"}, *items]}


# ---- what is taken --------------------------------------------------------------------------------------------------

CODEX = {
    "model": "small",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "tools": [FUNCTION, NAMESPACE, PATCH, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "thread-1",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
CLAUDE_CODE = {
    "system": [{"type": "text", "text": "You code.", "cache_control": EPHEMERAL | {"scope": "global"}}],
    "tools": [OURS | {"defer_loading": True, "eager_input_streaming": True}, SEARCH],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "metadata": {"user_id": json.dumps({"device_id": "d" * 300})},
    "service_tier": "auto",
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, CODEX),
        (RESPONSES, {"tools": [NAMESPACE], "tool_choice": {"type": "function", "name": "add"}}),
        (RESPONSES, {"tools": [NAMESPACE], "tool_choice": {"type": "function", "name": "mcp__mail__add"}}),
        (RESPONSES, {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}),
        (RESPONSES, {"tools": [FUNCTION | {"name": "a" * 128, "defer_loading": True}]}),
        (MESSAGES, CLAUDE_CODE),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": EPHEMERAL}]}),
        *((path, {"n": 2, "best_of": 2, "stream": True}) for path in (CHAT, COMPLETIONS)),
        (CHAT, {"cache_salt": "x" * 256, "cache_ttl_s": 86_400}),
        ("/v1/responses/input_tokens", {"instructions": "Be brief.", "tools": [NAMESPACE], "truncation": "disabled"}),
    ],
)
def test_fields_that_clients_send_are_taken(path: str, fields: dict[str, Any]) -> None:
    response = send(path, **fields)
    assert response.status_code == 200, response.text


THOUGHT = {"role": "assistant", "content": None, "reasoning": "Hm."}
NO_SEARCH = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "modalities": ["text"]}),
        (CHAT, {"tools": None, "tool_choice": "none", "metadata": {"run": "7"}, "safety_identifier": "s"}),
        (CHAT, {"functions": [], "function_call": "none", "store": False, "verbosity": "medium"}),
        (CHAT, {"response_format": {"type": "text"}, "logprobs": False, "service_tier": "default"}),
        (CHAT, {"reasoning_effort": "high", "service_tier": "auto", "prompt_cache_key": "k"}),
        (CHAT, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"messages": [THOUGHT, *HI], "structured_outputs": None, "guided_json": None}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "cache_control": EPHEMERAL}]}),
        (CHAT, {"kv_transfer_params": None, "mm_processor_kwargs": None, "logits_processors": None}),
        (CHAT, {"guided_decoding_backend": "guidance", "documents": None, "vllm_xargs": None}),
        (CHAT, {"service_tier": "flex", "prompt_cache_retention": "24h", "include_reasoning": True}),
        (COMPLETIONS, {"kv_transfer_params": None, "logits_processors": [], "request_id": None}),
        *((path, NO_SEARCH | {"stream": True}) for path in (CHAT, COMPLETIONS)),
        *((path, dict.fromkeys(["best_of", *NO_SEARCH]) | {"stream": True}) for path in (CHAT, COMPLETIONS)),
        (RESPONSES, {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}}),
        (MESSAGES, {"context_management": {"edits": []}, "thread": None, "fallbacks": None}),
    ],
)
def test_what_asks_for_nothing_changes_nothing(path: str, fields: dict[str, Any]) -> None:
    server = server_with()
    for asked in ({}, fields):
        response = send(path, server, **asked)
        assert response.status_code == 200, response.text
    plain, harmless = server.engine.requests
    assert harmless.params == plain.params


def test_responses_samples_as_it_is_asked_to() -> None:
    server = server_with()
    fields = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "seed": 3,
        "top_k": 4,
        "frequency_penalty": 0.5,
        "allowed_token_ids": [7],
        "logit_bias": {"5": 1.0},
    }
    assert send(RESPONSES, server, bad_words=["no"], **fields).status_code == 200
    params = server.engine.requests[0].params
    assert params is not None and params.bad_word_token_ids
    assert [getattr(params, name) for name in fields if name != "logit_bias"] == [0.25, 1.5, 3, 4, 0.5, (7,)]
    assert params.logit_bias == {5: 1.0}


WRITES_CALLS = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.strip() }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
ITERATES = WRITES_CALLS.replace("c.function.arguments | tojson", "c.function.arguments.items() | list")
SHELL = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}


@pytest.mark.parametrize(
    ("path", "template", "fields", "expected"),
    [
        (CHAT, WRITES_CALLS, chat_history('{"a": 1}'), '[assistant](add {"a": 1})[tool]7'),
        (CHAT, WRITES_CALLS, chat_history("", content=""), "[assistant](add {})[tool]7"),
        (CHAT, WRITES_CALLS, chat_history(CUT), f"[assistant](add {json.dumps(CUT)})[tool]7"),
        (CHAT, WRITES_CALLS, chat_history("[1]"), '[assistant](add "[1]")[tool]7'),
        (CHAT, WRITES_CALLS, chat_history('{"a":' * 200 + "1" + "}" * 200), '[assistant](add "{'),
        (CHAT, ITERATES, chat_history(CUT), "[assistant](add [])[tool]7"),
        (CHAT, CHAT_TEMPLATE, chat_history(CUT), f'"arguments": {CUT}}}'),
        (
            RESPONSES,
            WRITES_CALLS,
            response_history({"type": "function_call", "call_id": "c", "name": "add", "arguments": CUT}),
            f"[assistant](add {json.dumps(CUT)})",
        ),
        (
            RESPONSES,
            WRITES_CALLS,
            response_history(
                {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
                {"type": "function_call", "call_id": "c", "namespace": "mail", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "7"},
                {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
                {
                    "type": "custom_tool_call",
                    "call_id": "d",
                    "name": "apply_patch",
                    "input": "+a",
                    "status": "completed",
                },
                {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
                {"type": "local_shell_call", "id": "l", "call_id": "e", "status": "completed", "action": SHELL},
                {"type": "local_shell_call_output", "id": "e", "output": "file"},
            ),
            '[assistant](mail__add {})[tool]7[assistant](apply_patch {"input": "+a"})[tool]done'
            '[assistant](local_shell {"command": ["ls"], "env": {}})[tool]file',
        ),
        (
            CHAT,
            WRITES_CALLS,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": EPHEMERAL}]},
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                    *HI,
                ]
            },
            "[user]Hi[assistant]No.[user]Hi",
        ),
        (
            RESPONSES,
            WRITES_CALLS,
            {"tools": [FUNCTION, NAMESPACE, PATCH, {"type": "local_shell"}]},
            "<add><mcp__mail__add><apply_patch>[user]Hi",
        ),
        (MESSAGES, WRITES_CALLS, {"tools": [SEARCH, OURS]}, "<add>[user]Hi"),
    ],
)
def test_what_the_model_reads(path: str, template: str, fields: dict[str, Any], expected: str) -> None:
    server = server_with(template=template)
    response = send(path, server, **fields)
    assert response.status_code == 200, response.text
    text = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert expected in text


# ---- what is answered -----------------------------------------------------------------------------------------------


@pytest.fixture
def unconstrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine looks at grammars here."""
    monkeypatch.setattr(jobs, "_with_structured_outputs", lambda params, values, *, path: params)


def told(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(part.partition("\ndata: ")[2]) for part in response.text.removesuffix("\n\n").split("\n\n")]


CALLS = (
    '<tool_call>\n{"name": "mcp__mail__add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n',
    '{"name": "apply_patch", "arguments": {"input": "+a',
    '\\n"}}\n</tool_call>',
)


@pytest.mark.usefixtures("unconstrained")
def test_calls_come_back_under_the_names_that_the_client_gave() -> None:
    tools = [NAMESPACE, PATCH]
    call, patch = send(RESPONSES, server_with(*CALLS), tools=tools).json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__mail", "add")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "+a\n")
    assert "namespace" not in patch and "arguments" not in patch

    events = told(send(RESPONSES, server_with(*CALLS), tools=tools, stream=True))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["name"]) for item in items] == [
        ("function_call", "add"),
        ("custom_tool_call", "apply_patch"),
    ]
    assert items == events[-1]["response"]["output"]
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (begun[0]["namespace"], begun[0]["arguments"], begun[1]["input"]) == ("mcp__mail", "", "")
    assert [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"] == ["+a\n"]
    assert [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"] == ["add"]

    call["parsed_arguments"] = {"a": 1}
    again = send(RESPONSES, **response_history(call, *events[-1]["response"]["output"]))
    assert again.status_code == 200, "an answer can be sent back as it is"


@pytest.mark.usefixtures("unconstrained")
@pytest.mark.parametrize(("cut", "text"), [('{"input": "+a', "+a"), ('{"inp', ""), ("", "")])
def test_a_custom_tool_whose_call_is_cut_off_has_the_text_so_far(cut: str, text: str) -> None:
    words = ('<tool_call>\n{"name": "apply_patch", "arguments": ', cut)
    (patch,) = send(RESPONSES, server_with(*words), tools=[PATCH]).json()["output"]
    assert patch["input"] == text


THINKS = "{{ '<think>' }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '</think><think>' }}"


@pytest.mark.parametrize("display", [None, "omitted"])
def test_thoughts_that_are_not_to_be_displayed(display: str | None) -> None:
    thinking = {"type": "adaptive", "display": display}
    words, shown = ("hm", "</think>", "Yes."), "" if display else "hm"
    whole = send(MESSAGES, server_with(*words, template=THINKS), thinking=thinking).json()["content"]
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in whole] == [
        ("thinking", shown),
        ("text", "Yes."),
    ]
    assert "citations" not in whole[1]
    events = told(send(MESSAGES, server_with(*words, template=THINKS), thinking=thinking, stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == shown
    assert "".join(delta.get("text", "") for delta in deltas) == "Yes."


@pytest.mark.parametrize(
    ("path", "counting", "fields"),
    [
        (RESPONSES, "input_tokens", {"instructions": "Be brief.", "tools": [NAMESPACE, {"type": "web_search"}]}),
        (MESSAGES, "count_tokens", {"system": "Be brief.", "tools": [OURS]}),
    ],
)
def test_tokens_are_counted_as_they_are_used(path: str, counting: str, fields: dict[str, Any]) -> None:
    server = server_with()
    usage = send(path, server, **fields).json()["usage"]
    counted = send(f"{path}/{counting}", server, **fields).json()
    assert counted["input_tokens"] == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert counted.get("object", "response.input_tokens") == "response.input_tokens"
    assert len(server.engine.requests) == 1, "nothing is computed for it"


def test_tokenize_tells_tokens_as_text() -> None:
    server = server_with()
    answer = server.post("/tokenize", {"prompt": "Hi you", "return_token_strs": True}).json()
    assert answer["token_strs"] == [server.tokenizer.backend.id_to_token(token) for token in answer["tokens"]]
    assert server.post("/tokenize", {"prompt": "Hi"}).json()["token_strs"] is None


def test_hosted_tools_are_left_out_with_a_line_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    api_translation._log_left_out.cache_clear()
    with caplog.at_level(logging.WARNING, logger="headway.server.api.api_translation"):
        for date in ("20250910", "20260209"):
            assert send(RESPONSES, tools=[{"type": "web_search"}, {"type": "image_generation"}]).status_code == 200
            assert send(MESSAGES, tools=[{"type": f"web_fetch_{date}", "name": "web_fetch"}]).status_code == 200
    assert [record.args for record in caplog.records] == [("web_search",), ("image_generation",), ("web_fetch",)]


@pytest.mark.parametrize(
    ("rename", "old", "new"),
    [
        (RESPONSES_NAMES, "messages[3].content", "input"),
        (RESPONSES_NAMES, "max_completion_tokens", "max_output_tokens"),
        (RESPONSES_NAMES, "response_format.json_schema.schema.a", "text.format.schema.a"),
        (RESPONSES_NAMES, "tools[2].function.parameters.type", "tools[2].parameters.type"),
        (RESPONSES_NAMES, "temperature", "temperature"),
        (MESSAGES_NAMES, "messages[3].content", "messages"),
        (MESSAGES_NAMES, "user", "metadata.user_id"),
        (MESSAGES_NAMES, "cache_ttl_s", "cache_control"),
        (MESSAGES_NAMES, "response_format.json_schema.schema.type", "output_config.format.schema.type"),
        (MESSAGES_NAMES, "tools[2].function.parameters.type", "tools[2].input_schema.type"),
        (MESSAGES_NAMES, "tools[2].function.name", "tools[2].name"),
    ],
)
def test_what_chat_refuses_is_told_in_the_clients_words(rename: Any, old: str, new: str) -> None:
    told = rename(bad_request(f"'{old}' is wrong.", param=old, code="c"))
    assert (str(told), told.param, told.code) == (f"'{new}' is wrong.", new, "c")
    assert str(rename(bad_request(f"{old} must be good.", param=old))) == f"{new} must be good."


TOOL = "tools[0].function"


@pytest.mark.parametrize(
    ("rename", "param", "message", "expected"),
    [
        (RESPONSES_NAMES, TOOL, "'tools[0].function.parameters' is wrong", "'tools[0].parameters' is wrong"),
        (RESPONSES_NAMES, TOOL, "tools[0].function.parameters.a: no.", "tools[0].parameters.a: no."),
        (RESPONSES_NAMES, TOOL, "'max_tokens' or 'response_format'", "'max_output_tokens' or 'text.format'"),
        (RESPONSES_NAMES, TOOL, "send 'messages'; messages are good", "send 'messages'; messages are good"),
        (RESPONSES_NAMES.at(["tools[3].tools[1]"]), TOOL, "'tools[0].function.name'", "'tools[3].tools[1].name'"),
        (RESPONSES_NAMES.at([]), TOOL, "'tools[0].function.name'", "'tools[0].name'"),
        (MESSAGES_NAMES, TOOL, "tools[2].function.parameters: no", "tools[2].input_schema: no"),
        (MESSAGES_NAMES.at(["tools[1]"]), TOOL, "of 'tools[0].function' twice", "of 'tools[1]' twice"),
        (MESSAGES_NAMES, "stop", "'stop' may stop no text", "'stop_sequences' may stop no text"),
        (MESSAGES_NAMES, "stop", "stop may stop no text", "stop_sequences may stop no text"),
        (MESSAGES_NAMES, "top_p", "'stop' is no user", "'stop' is no user"),
        (RESPONSES_NAMES, "messages", "'messages' must be messages", "'input' must be messages"),
    ],
)
def test_paths_are_renamed_wherever_they_stand_and_words_are_no_fields(
    rename: Any, param: str, message: str, expected: str
) -> None:
    assert str(rename(bad_request(message, param=param))) == expected


def test_a_thread_is_refused_so_that_anthropics_tool_runner_goes_on_without_one() -> None:
    error = send(MESSAGES, thread={"type": "create"}).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "thread=False" in error["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/completions"])
@pytest.mark.parametrize("text", ["word " * 5000, "x" * 300_000], ids=["tokens", "characters"])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(path: str, text: str) -> None:
    name = {"/v1/completions": "prompt", RESPONSES: "input"}.get(path, "messages")
    response = send(path, **{name: text if name != "messages" else [{"role": "user", "content": text}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "This model's maximum context length is 4096 tokens. However, " in error["message"]
    assert f"'{name}'" in error["message"]
    if path == MESSAGES:
        found = error["message"].removeprefix("prompt is too long: ").split(" ")
        assert int(found[0]) > 4095 and found[1:5] == ["tokens", ">", "4095", "maximum."]
    else:
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "", "stores none"),
        ("DELETE", "", "stores none"),
        ("GET", "/input_items", "stores none"),
        ("POST", "/cancel", "'resp_1'"),
    ],
)
def test_no_response_is_stored(method: str, path: str, words: str) -> None:
    response = server_with().call(method, f"/v1/responses/resp_1{path}", json={})
    assert response.status_code == 404 and words in response.json()["error"]["message"]
    assert "compact" in server_with().post("/v1/responses/compact", {}).json()["error"]["message"]
