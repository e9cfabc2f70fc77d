"""A body of /v1/responses as the chat request that it stands for."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.server.api.responses_api import ResponsesRequest, chat_fields_of_response

HI = [{"role": "user", "content": "Hi"}]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."}


def chat(**body: Any) -> dict[str, Any]:
    return chat_fields_of_response(msgspec.convert({"input": "Hi"} | body, ResponsesRequest))


def test_a_string_is_one_message_of_the_user() -> None:
    assert chat() == {"messages": HI}
    system = {"role": "system", "content": "Be brief."}
    assert chat(instructions="Be brief.")["messages"] == [system, *HI]


def test_fields_under_chats_names() -> None:
    assert chat(
        model="m",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=3,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
        user="u",
        stream=True,
        store=False,
        background=False,
        metadata={"a": "b"},
        service_tier="auto",
        truncation="disabled",
        priority=3,
        service_class="batch",
        cache_ttl_s=60.0,
        text={"format": {"type": "json_object"}},
    ) == {
        "model": "m",
        "messages": HI,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 3,
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
        "user": "u",
        "stream": True,
        "priority": 3,
        "service_class": "batch",
        "cache_ttl_s": 60.0,
        "response_format": {"type": "json_object"},
    }


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

    def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}

    two = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(input=items, instructions="Be brief.")["messages"] == [
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


def test_tools_and_choices() -> None:
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."}
    named = {"type": "function", "function": {"name": "add"}}
    assert chat(tools=[ADD])["tools"] == [{"type": "function", "function": function}]
    assert chat(tools=[{"type": "function", "name": "add", "parameters": None, "strict": None}])["tools"] == [named]
    assert "tools" not in chat(tools=[])
    for choice in ("none", "auto", "required"):
        assert chat(tools=[ADD], tool_choice=choice)["tool_choice"] == choice
    assert chat(tools=[ADD], tool_choice={"type": "function", "name": "add"})["tool_choice"] == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    assert chat(tools=[ADD], tool_choice=allowed)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }


def test_a_schema_for_the_text() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat(text={"format": form})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert chat(text={"format": {"type": "text"}, "verbosity": "medium"})["response_format"] == {"type": "text"}


def test_what_benchmarks_send() -> None:
    extra = {"stop": ["."], "seed": 4, "top_k": 5, "min_tokens": 2, "ignore_eos": True}
    assert chat(**extra) == {"messages": HI, **extra}
    assert chat(stop=None, ignore_eos=None) == {"messages": HI}
