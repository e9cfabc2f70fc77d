"""Bodies of /v1/responses and /v1/messages as the chat requests that they stand for."""

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
from headway.server.api.responses_api import ResponsesRequest, chat_fields_of_response
from tests.unit.server.fake_engine import HI

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."}
OURS = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


# ---- /v1/responses --------------------------------------------------------------------------------------------------


def of_response(**body: Any) -> dict[str, Any]:
    return chat_fields_of_response(msgspec.convert({"input": "Hi"} | body, ResponsesRequest))


def test_fields_under_chats_names_of_a_response() -> None:
    same = {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 3,
        "parallel_tool_calls": False,
        "user": "u",
        "stream": True,
        "priority": 3,
        "service_class": "batch",
        "cache_ttl_s": 60.0,
        "stop": ["."],
        "seed": 4,
        "top_k": 5,
        "min_tokens": 2,
        "ignore_eos": True,  # as benchmarks send them
    }
    nothing = {"store": False, "background": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    assert of_response(
        max_output_tokens=7,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        truncation="disabled",
        text={"format": {"type": "json_object"}},
        instructions="Be brief.",
        **same,
        **nothing,
    ) == {
        "messages": [{"role": "system", "content": "Be brief."}, *HI],
        "max_completion_tokens": 7,
        "logprobs": True,
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
        **same,
    }
    assert of_response(stop=None, ignore_eos=None) == {"messages": HI}


def test_items_are_turns_of_the_conversation() -> None:
    """Thoughts, text and calls that follow one another are one message of the assistant."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Count."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("one", "two")]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "short"}],
            "content": [{"type": "reasoning_text", "text": "hm"}, {"type": "reasoning_text", "text": "m"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "add",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": "5"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]

    two = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert of_response(input=items, instructions="Be brief.")["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Count."}]},
        {"role": "user", "content": two},
        {
            "role": "assistant",
            "reasoning_content": "hmm",
            "content": "Let me see.",
            "tool_calls": [call("c1"), call("c2", '{"a":1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "assistant", "reasoning_content": "so", "tool_calls": [call("c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": "5"},
        {"role": "assistant", "content": "No."},
    ]


def test_tools_and_choices_of_a_response() -> None:
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."}
    named = {"type": "function", "function": {"name": "add"}}
    assert of_response(tools=[ADD])["tools"] == [{"type": "function", "function": function}]
    assert of_response(tools=[{"type": "function", "name": "add", "parameters": None, "strict": None}])["tools"] == [
        named
    ]
    assert "tools" not in of_response(tools=[])
    for choice in ("none", "auto", "required"):
        assert of_response(tools=[ADD], tool_choice=choice)["tool_choice"] == choice
    assert of_response(tools=[ADD], tool_choice={"type": "function", "name": "add"})["tool_choice"] == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    assert of_response(tools=[ADD], tool_choice=allowed)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }


def test_a_schema_for_the_text() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert of_response(text={"format": form})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert of_response(text={"format": {"type": "text"}, "verbosity": "medium"})["response_format"] == {"type": "text"}


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


def of_message(**body: Any) -> dict[str, Any]:
    required = {"model": "m", "max_tokens": 9, "messages": HI}
    fields = chat_fields_of_message(msgspec.convert(required | body, MessagesRequest))
    return {name: value for name, value in fields.items() if (name, value) not in required.items()}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


def test_fields_under_chats_names_of_a_message() -> None:
    schema = {"type": "object"}
    same = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "stream": True, "service_class": "batch"}
    assert of_message() == {"max_completion_tokens": 9}
    assert of_message(
        system=[text("Be brief."), text("Be kind.")],
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 5},
        service_tier="auto",
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        **same,
    ) == {
        "messages": [{"role": "system", "content": [text("Be brief."), text("Be kind.")]}, *HI],
        "max_completion_tokens": 9,
        "stop": ["END"],
        "user": "u",
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        **same,
    }
    assert of_message(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in of_message(thinking={"type": "adaptive"})
    assert "response_format" in of_message(output_format={"type": "json_schema", "schema": schema})
    begun = of_message(messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)


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

    assert of_message(messages=messages, system="Count.")["messages"] == [
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


def test_tools_and_choices_of_a_message() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert of_message(tools=[OURS])["tools"] == [{"type": "function", "function": function}]
    strict = OURS | {"type": "custom", "strict": True}
    assert of_message(tools=[strict])["tools"] == [{"type": "function", "function": function | {"strict": True}}]
    for theirs, chats in (("auto", "auto"), ("any", "required"), ("none", "none")):
        fields = of_message(tools=[OURS], tool_choice={"type": theirs})
        assert fields["tool_choice"] == chats
        assert "parallel_tool_calls" not in fields
    one = of_message(tools=[OURS], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    assert one["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert one["parallel_tool_calls"] is False


def test_the_longest_cache_control_pins_the_prompt() -> None:
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    assert of_message(cache_control=short)["cache_ttl_s"] == 300.0
    assert (
        of_message(system=[text("a", cache_control=short)], tools=[OURS | {"cache_control": long}])["cache_ttl_s"]
        == 3600.0
    )
    assert of_message(messages=[{"role": "user", "content": [text("a", cache_control=long)]}])["cache_ttl_s"] == 3600.0
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("a", cache_control=short)]}
    assert of_message(messages=[{"role": "user", "content": [result]}])["cache_ttl_s"] == 300.0


def test_counting_makes_the_same_prompt() -> None:
    body = {"model": "m", "messages": HI, "system": "Be brief.", "tools": [OURS], "tool_choice": {"type": "any"}}
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
