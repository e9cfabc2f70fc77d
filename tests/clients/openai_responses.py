"""OpenAI's Python client against /v1/responses of a running server. Run by hand: python openai_responses.py URL

Checked with openai 2.54.0 (Python 3.11). The client is no dependency of the project: install it elsewhere. Functions,
schemas and refusals are in openai_responses.mjs, and in the scripts of what stands on this client.
"""

from __future__ import annotations

from typing import Any

import openai
from client_checks import WEATHER, Checks

checks = Checks("openai")
client = openai.OpenAI(base_url=checks.base_url, api_key="none", max_retries=0)


def logprobs() -> Any:
    told = client.responses.create(
        model=checks.model, input="Hi", max_output_tokens=3, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    assert told.incomplete_details.reason == "max_output_tokens"
    return [(each.token, len(each.top_logprobs)) for each in told.output[0].content[0].logprobs]


def streamed() -> Any:
    asked = {"model": checks.model, "input": "Say hello.", "max_output_tokens": 24, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == client.responses.create(**asked, store=False).output_text
    assert events[-1].type in ("response.completed", "response.incomplete")
    return len(events), text


def tools_of_an_agent() -> Any:
    """As Codex sends them: in a namespace, with text as input, and one that only OpenAI can run."""
    city = {"type": "string", "enum": ["Paris", "Oslo"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    weather = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": parameters}
    asked = {
        "model": checks.model,
        "instructions": "You are an agent.",
        "input": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [
            {"type": "namespace", "name": "mcp__weather", "description": "Weather.", "tools": [weather]},
            {"type": "custom", "name": "apply_patch", "description": "Edits files."},
            {"type": "web_search"},
        ],
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "max_output_tokens": 128,
        "extra_body": {"client_metadata": {"installation": "1"}, "repetition_penalty": 1.1},
    }
    assert client.responses.create(**asked).status in ("completed", "incomplete")
    named = asked | {"tool_choice": {"type": "function", "name": "get_weather"}}
    with client.responses.stream(**named) as stream:
        call = stream.get_final_response().output[-1]
    assert (call.type, call.namespace, call.name) == ("function_call", "mcp__weather", "get_weather")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    turns = [*asked["input"], call.to_dict(), result]
    custom = asked | {"input": turns, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    patch = client.responses.create(**custom).output[-1]
    assert (patch.type, patch.name, patch.namespace) == ("custom_tool_call", "apply_patch", None)
    with client.responses.stream(**custom) as stream:
        kinds = [event.type for event in stream]
    assert "response.custom_tool_call_input.done" in kinds
    return call.arguments, patch.input[:40]


def counted() -> int:
    asked = {"model": checks.model, "input": "Say hello.", "instructions": "Be brief."}
    number: int = client.responses.input_tokens.count(**asked).input_tokens
    assert number == client.responses.create(**asked, max_output_tokens=1).usage.input_tokens
    return number


for check in (logprobs, streamed, tools_of_an_agent, counted):
    checks.check(check.__name__, check)
checks.finish()
