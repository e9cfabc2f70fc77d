"""OpenAI's Python client against /v1/chat/completions of a running server. Run by hand: python openai_chat.py URL

Checked with openai 3.49.0 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from client_checks import WEATHER, Checks, Person
from pydantic import BaseModel

checks = Checks("openai")
client = openai.OpenAI(base_url=checks.base_url, api_key="none", max_retries=0)
COMMON: dict[str, Any] = {"model": checks.model, "temperature": 0, "max_completion_tokens": 96}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

SHORT: list[Any] = [{"role": "user", "content": 'Say {"name": "Ada"} as JSON, and nothing else.'}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Oslo"]


TOOL = openai.pydantic_function_tool(GetWeather)


def parse() -> Person:
    message = client.chat.completions.parse(**COMMON, messages=ASKED, response_format=Person).choices[0].message
    assert isinstance(message.parsed, Person)
    client.chat.completions.parse(**COMMON, messages=[*ASKED, message, *ASKED], response_format=Person)
    return message.parsed


def parse_tools(**more: Any) -> Any:
    answer = client.chat.completions.parse(**COMMON, messages=ASKED, tools=[TOOL], **more).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    results = []
    for call in answer.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather)
        results.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER})
    client.chat.completions.create(**COMMON, messages=[*ASKED, answer.message, *results], tools=[TOOL])
    return [call.function.arguments for call in answer.message.tool_calls]


def streamed(messages: Any = ASKED, **more: Any) -> Any:
    with client.chat.completions.stream(**COMMON, messages=messages, **more) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    if "tools" in more:
        assert message.tool_calls and isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
        return message.tool_calls[0].function.arguments, len(kinds)
    if "response_format" in more:
        assert isinstance(message.parsed, Person)
    return message.content, len(kinds)


def json_object() -> Any:
    answer = client.chat.completions.create(**COMMON, messages=SHORT, response_format={"type": "json_object"})
    return json.loads(answer.choices[0].message.content or "")


checks.check("stream", lambda: streamed(SHORT))
checks.check("response_format json_object", json_object)
checks.check("parse, a class", parse)
checks.check("parse, a class, streamed", lambda: streamed(response_format=Person))
checks.check("parse, tools required, and the results", lambda: parse_tools(tool_choice="required"))
checks.check(
    "parse, tool named, and the result",
    lambda: parse_tools(tool_choice={"type": "function", "function": {"name": "GetWeather"}}),
)
checks.check(
    "parse, allowed tools",
    lambda: parse_tools(
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "GetWeather"}}]},
        }
    ),
)
checks.check("tools, streamed", lambda: streamed(tools=[TOOL], tool_choice="required", parallel_tool_calls=False))
checks.check(
    "tools and a class",
    lambda: (
        client.chat.completions.parse(**COMMON, messages=ASKED, tools=[TOOL], response_format=Person)
        .choices[0]
        .message.content
    ),
)
checks.finish()
