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
from headway.tokenizer import tokenizer_from_gguf
from tests.unit.server.fake_engine import FakeEngine, FakeServer, engine_ready
from tests.unit.tokenizer.small import byte_level_metadata

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    MESSAGES: {"model": "small", "max_tokens": 50, "messages": HI},
}
OBJECT = {"type": "object"}
UNUSABLE = {"type": "object", "properties": {"x": {"$ref": "https://example.org/schema"}}}
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


def server_with(*words: str, template: str | None = None) -> FakeServer:
    tokenizer = None
    if template is not None:
        tokenizer = tokenizer_from_gguf(byte_level_metadata(pre="gpt-2", **{"tokenizer.chat_template": template}))
    server = FakeServer(FakeEngine(words=words or ("Hello", " world", ".")), tokenizer=tokenizer)
    server.engine.info = engine_ready(max_model_len=4096)
    return server


def send(path: str, server: FakeServer | None = None, **fields: Any) -> httpx.Response:
    return (server or server_with()).post(path, NEEDED[path] | fields)


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
        (RESPONSES, {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}}),
        (
            RESPONSES,
            {"chat_template_kwargs": {"enable_thinking": False}, "repetition_penalty": 1.1, "min_p": 0.1, "top_k": 4},
        ),
        (RESPONSES, {"frequency_penalty": 0.5, "bad_words": ["no"], "logit_bias": {"5": 1}, "allowed_token_ids": [7]}),
        (MESSAGES, CLAUDE_CODE),
        (MESSAGES, {"context_management": {"edits": []}, "thread": None, "fallbacks": None}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": EPHEMERAL}]}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "cache_control": EPHEMERAL}]}),
        (CHAT, {"kv_transfer_params": None, "mm_processor_kwargs": None, "logits_processors": None}),
        (CHAT, {"guided_decoding_backend": "guidance", "guided_json": None, "documents": None, "vllm_xargs": None}),
        (CHAT, {"service_tier": "flex", "prompt_cache_retention": "24h", "include_reasoning": True}),
        ("/v1/completions", {"kv_transfer_params": None, "logits_processors": [], "request_id": None}),
        ("/v1/responses/input_tokens", {"instructions": "Be brief.", "tools": [NAMESPACE], "truncation": "disabled"}),
    ],
)
def test_fields_that_clients_send_are_taken(path: str, fields: dict[str, Any]) -> None:
    response = send(path, **fields)
    assert response.status_code == 200, response.text


def test_responses_samples_as_it_is_asked_to() -> None:
    server = server_with()
    assert send(RESPONSES, server, min_p=0.25, repetition_penalty=1.5, bad_words=["no"], seed=3).status_code == 200
    params = server.engine.requests[0].params
    assert params is not None
    assert (params.min_p, params.repetition_penalty, params.seed) == (0.25, 1.5, 3)
    assert params.bad_word_token_ids


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
        (CHAT, None, chat_history(CUT), f'"arguments": {CUT}}}'),
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
def test_what_the_model_reads(path: str, template: str | None, fields: dict[str, Any], expected: str) -> None:
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


def test_tokens_of_a_response_are_counted_as_they_are_used() -> None:
    fields = {"instructions": "Be brief.", "tools": [NAMESPACE, {"type": "web_search"}]}
    server = server_with()
    used = send(RESPONSES, server, **fields).json()["usage"]["input_tokens"]
    counted = send("/v1/responses/input_tokens", server, **fields).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": used}
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


# ---- what is refused ------------------------------------------------------------------------------------------------


ONE = {"role": "user", "content": [{"type": "text", "text": "a"}]}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        (RESPONSES, "tools[0]", {"tools": [{"type": "web_search"}, FUNCTION], "tool_choice": "required"}),
        (RESPONSES, "tools[0]", {"tools": ["add"]}),
        (RESPONSES, "tools[0].type", {"tools": [{"type": "frobnicate"}]}),
        (RESPONSES, "tools[0].type", {"tools": [{"name": "add"}]}),
        (RESPONSES, "tools[0].tools[0].type", {"tools": [NAMESPACE | {"tools": [{"type": "web_search"}]}]}),
        (RESPONSES, "tools[1].name", {"tools": [NAMESPACE, FUNCTION | {"name": "mcp__mail__add"}]}),
        (RESPONSES, "tools[1].name", {"tools": [FUNCTION, FUNCTION]}),
        (RESPONSES, "tools", {"tools": [NAMESPACE | {"tools": [FUNCTION] * 600}]}),
        (RESPONSES, "tools", {"tools": [FUNCTION] * 600}),
        (
            *(RESPONSES, "tools[1].tools[0].name"),
            {"tools": [{"type": "web_search"}, NAMESPACE | {"tools": [FUNCTION | {"name": "a b"}]}]},
        ),
        (RESPONSES, "tools[0].parameters.type", {"tools": [FUNCTION | {"parameters": {"type": "string"}}]}),
        (RESPONSES, "tools[1].parameters", {"tools": [{"type": "web_search"}, FUNCTION | {"parameters": UNUSABLE}]}),
        (RESPONSES, "tool_choice", {"tool_choice": "sometimes"}),
        (RESPONSES, "tool_choice.name", {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "sub"}}),
        (RESPONSES, "tool_choice.type", {"tool_choice": {"type": "web_search_preview"}}),
        (
            RESPONSES,
            "text.format.schema",
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": UNUSABLE}}},
        ),
        (RESPONSES, "text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
        (RESPONSES, "text.format.type", {"text": {"format": {"type": "grammar"}}}),
        (RESPONSES, "text.verbosity", {"text": {"verbosity": "low"}}),
        (RESPONSES, "background", {"background": 0.0}),
        (RESPONSES, "background", {"background": True}),
        (RESPONSES, "min_p", {"min_p": 7}),
        (RESPONSES, "n", {"n": 2}),
        (RESPONSES, "top_logprobs", {"top_logprobs": 99}),
        (RESPONSES, "max_output_tokens", {"max_output_tokens": 0}),
        (RESPONSES, "temperature", {"temperature": -1}),
        (RESPONSES, "user", {"user": "u" * 300}),
        (RESPONSES, "colour", {"colour": 1}),
        (RESPONSES, "reasoning.effort", {"reasoning": {"effort": "huge"}}),
        (RESPONSES, "reasoning.mode", {"reasoning": {"mode": "pro"}}),
        (RESPONSES, "store", {"store": True}),
        (RESPONSES, "previous_response_id", {"previous_response_id": "resp_1"}),
        (RESPONSES, "conversation", {"conversation": "conv_1"}),
        (RESPONSES, "prompt", {"prompt": {"id": "p"}}),
        (RESPONSES, "truncation", {"truncation": "auto"}),
        (RESPONSES, "include", {"include": ["file_search_call.results"]}),
        (RESPONSES, "stream_options", {"stream_options": {"include_obfuscation": False}}),
        (
            *(RESPONSES, "stream_options.include_obfuscation"),
            {"stream": True, "stream_options": {"include_obfuscation": True}},
        ),
        (RESPONSES, "input", {"input": None}),
        (RESPONSES, "input", {"input": []}),
        (RESPONSES, "input", {"input": HI * 20_000}),
        (RESPONSES, "input", {"input": [{"type": "function_call_output", "call_id": "", "output": ""}]}),
        (RESPONSES, "input[0]", {"input": ["Hi"]}),
        (RESPONSES, "input[0].type", {"input": [{"type": "compaction", "encrypted_content": "x"}]}),
        (RESPONSES, "input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        (RESPONSES, "input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}),
        (RESPONSES, "input[0].content", {"input": [{"role": "user"}]}),
        (RESPONSES, "input[0].colour", {"input": [HI[0] | {"colour": 1}]}),
        (RESPONSES, "input[0].content[0].type", {"input": [HI[0] | {"content": [{"type": "input_image"}]}]}),
        (MESSAGES, "tools[0].input_schema", {"tools": [OURS | {"input_schema": UNUSABLE}]}),
        (MESSAGES, "tools[0].input_schema", {"tools": [{"name": "add"}]}),
        (MESSAGES, "tools[0].input_schema.type", {"tools": [OURS | {"input_schema": {"type": "string"}}]}),
        (MESSAGES, "tools[0].input_examples", {"tools": [OURS | {"input_examples": [{}]}]}),
        (MESSAGES, "tools[0].name", {"tools": [OURS | {"name": ""}]}),
        (MESSAGES, "tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (MESSAGES, "tools[1].input_schema", {"tools": [SEARCH, OURS | {"input_schema": UNUSABLE}]}),
        (MESSAGES, "tools[1].name", {"tools": [SEARCH, OURS | {"name": "a b"}]}),
        (MESSAGES, "tools[1]", {"tools": [OURS, SEARCH], "tool_choice": {"type": "any"}}),
        (MESSAGES, "tool_choice.name", {"tool_choice": {"type": "tool"}}),
        (MESSAGES, "tool_choice.name", {"tool_choice": {"type": "auto", "name": "add"}}),
        (
            *(MESSAGES, "output_config.format.schema"),
            {"output_config": {"format": {"type": "json_schema", "schema": UNUSABLE}}},
        ),
        (MESSAGES, "output_config.effort", {"output_config": {"effort": "huge"}}),
        (MESSAGES, "context_management", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        (
            *(MESSAGES, "context_management.edits[0].keep"),
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"value": 1}}]}},
        ),
        (MESSAGES, "thread", {"thread": {"type": "create"}}),
        (MESSAGES, "thinking.display", {"thinking": {"type": "adaptive", "display": "updates"}}),
        (MESSAGES, "thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
        (MESSAGES, "thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 50}}),
        (MESSAGES, "compaction", {"compaction": {"type": "summarize"}}),
        (MESSAGES, "mcp_servers", {"mcp_servers": [{"url": "x"}]}),
        (MESSAGES, "container", {"container": "c"}),
        (MESSAGES, "speed", {"speed": "fast"}),
        (MESSAGES, "max_tokens", {"max_tokens": None}),
        (MESSAGES, "max_tokens", {"max_tokens": 0}),
        (MESSAGES, "model", {"model": None}),
        (MESSAGES, "stop_sequences", {"stop_sequences": ["a" * 2000]}),
        (MESSAGES, "colour", {"colour": 1}),
        (MESSAGES, "system[0].type", {"system": [{"type": "image"}]}),
        (MESSAGES, "messages", {"messages": []}),
        *(
            (MESSAGES, "messages[0].content[0].type", user({"type": kind, "source": {}}))
            for kind in ("image", "document", "tool_use")
        ),
        (MESSAGES, "messages[0].content[0].citations", user({"type": "text", "text": "a", "citations": [{}]})),
        (MESSAGES, "messages[0].content[0].text", user({"type": "text"})),
        (
            *(MESSAGES, "messages[0].content[1].content[0].type"),
            user(*ONE["content"], {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        ),
        (
            *(MESSAGES, "messages[1].content[0].type"),
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        ),
        (CHAT, "kv_transfer_params", {"kv_transfer_params": {"do_remote_decode": True}}),
        (CHAT, "logits_processors", {"logits_processors": ["x"]}),
        (CHAT, "messages[0].content[0].text", user({"type": "refusal", "text": "a"})),
        (CHAT, "messages[0].content[0].type", user({"type": "image_url"})),
    ],
)
def test_refusals_name_the_clients_own_fields(path: str, param: str, fields: dict[str, Any]) -> None:
    response = send(path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param in error["message"] and error["type"] == "invalid_request_error"
    assert "function.parameters" not in error["message"] and "response_format" not in error["message"]
    assert path == MESSAGES or param in error["param"]


@pytest.mark.parametrize(
    ("rename", "old", "new"),
    [
        (RESPONSES_NAMES, "messages[3].content", "input"),
        (RESPONSES_NAMES, "max_tokens", "max_output_tokens"),
        (RESPONSES_NAMES, "max_completion_tokens", "max_output_tokens"),
        (
            *(RESPONSES_NAMES, "response_format.json_schema.schema.properties.a"),
            "text.format.schema.properties.a",
        ),
        (RESPONSES_NAMES, "tools[2].function.parameters.type", "tools[2].parameters.type"),
        (RESPONSES_NAMES, "tool_choice.function.name", "tool_choice.name"),
        (RESPONSES_NAMES, "reasoning_effort", "reasoning.effort"),
        (RESPONSES_NAMES, "temperature", "temperature"),
        (MESSAGES_NAMES, "messages[3].content", "messages"),
        (MESSAGES_NAMES, "max_completion_tokens", "max_tokens"),
        (MESSAGES_NAMES, "stop", "stop_sequences"),
        (MESSAGES_NAMES, "user", "metadata.user_id"),
        (MESSAGES_NAMES, "cache_ttl_s", "cache_control"),
        (MESSAGES_NAMES, "response_format.json_schema.schema.type", "output_config.format.schema.type"),
        (MESSAGES_NAMES, "tools[2].function.parameters.type", "tools[2].input_schema.type"),
        (MESSAGES_NAMES, "tools[2].function.name", "tools[2].name"),
        (MESSAGES_NAMES, "top_p", "top_p"),
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


def test_responses_that_are_not_stored() -> None:
    assert "'resp_1'" in server_with().post("/v1/responses/resp_1/cancel", {}).json()["error"]["message"]
    assert "compact" in server_with().post("/v1/responses/compact", {}).json()["error"]["message"]
