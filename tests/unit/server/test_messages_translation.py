"""A body of /v1/messages as the chat request that it stands for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headway.server.api.api_errors import ApiError
from headway.server.api.message_errors import message_error
from headway.server.api.messages_api import (
    CountTokensRequest,
    MessagesRequest,
    chat_fields_of_message,
    chat_fields_of_prompt,
)

HI = [{"role": "user", "content": "Hi"}]
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def chat(**body: Any) -> dict[str, Any]:
    required = {"model": "m", "max_tokens": 9, "messages": HI}
    fields = chat_fields_of_message(msgspec.convert(required | body, MessagesRequest))
    return {name: value for name, value in fields.items() if (name, value) not in required.items()}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


def test_the_least_that_can_be_asked() -> None:
    assert chat() == {"max_completion_tokens": 9}


def test_fields_under_chats_names() -> None:
    schema = {"type": "object"}
    assert chat(
        system=[text("Be brief."), text("Be kind.")],
        stop_sequences=["END"],
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 5},
        stream=True,
        service_tier="auto",
        service_class="batch",
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
    ) == {
        "messages": [{"role": "system", "content": [text("Be brief."), text("Be kind.")]}, *HI],
        "max_completion_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "user": "u",
        "chat_template_kwargs": {"enable_thinking": True},
        "stream": True,
        "service_class": "batch",
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    }
    assert chat(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in chat(thinking={"type": "adaptive"})
    assert "response_format" in chat(output_format={"type": "json_schema", "schema": schema})


def test_blocks_are_turns_of_the_conversation() -> None:
    messages = [
        {"role": "user", "content": [text("one"), text("two")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("Let me see."),
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("bad")], "is_error": True},
                text("Go on."),
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t3", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
    ]

    def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}

    assert chat(messages=messages, system="Count.")["messages"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": [text("one"), text("two")]},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "Let me see.",
            "tool_calls": [call("t1", '{"a":1}'), call("t2")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: bad"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "tool_calls": [call("t3")]},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
    ]


def test_an_answer_that_is_begun_is_continued() -> None:
    fields = chat(messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert fields["continue_final_message"] is True
    assert fields["add_generation_prompt"] is False


def test_tools_and_choices() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert chat(tools=[ADD])["tools"] == [{"type": "function", "function": function}]
    strict = ADD | {"type": "custom", "strict": True}
    assert chat(tools=[strict])["tools"] == [{"type": "function", "function": function | {"strict": True}}]
    for theirs, chats in (("auto", "auto"), ("any", "required"), ("none", "none")):
        fields = chat(tools=[ADD], tool_choice={"type": theirs})
        assert fields["tool_choice"] == chats
        assert "parallel_tool_calls" not in fields
    one = chat(tools=[ADD], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    assert one["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert one["parallel_tool_calls"] is False


def test_the_longest_cache_control_pins_the_prompt() -> None:
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    assert chat(cache_control=short)["cache_ttl_s"] == 300.0
    assert chat(system=[text("a", cache_control=short)], tools=[ADD | {"cache_control": long}])["cache_ttl_s"] == 3600.0
    assert chat(messages=[{"role": "user", "content": [text("a", cache_control=long)]}])["cache_ttl_s"] == 3600.0
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("a", cache_control=short)]}
    assert chat(messages=[{"role": "user", "content": [result]}])["cache_ttl_s"] == 300.0


def test_counting_makes_the_same_prompt() -> None:
    body = {"model": "m", "messages": HI, "system": "Be brief.", "tools": [ADD], "tool_choice": {"type": "any"}}
    counted = chat_fields_of_prompt(msgspec.convert(body, CountTokensRequest))
    answered = chat_fields_of_message(msgspec.convert(body | {"max_tokens": 9}, MessagesRequest))
    assert answered == counted | {"max_completion_tokens": 9}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (413, "request_too_large"), (500, "api_error")],
)
def test_errors_in_anthropics_form(status: int, kind: str) -> None:
    body = msgspec.json.decode(msgspec.json.encode(message_error(ApiError(status, "No."), request_id="r")))
    assert body == {"type": "error", "error": {"type": kind, "message": "No."}, "request_id": "r"}
