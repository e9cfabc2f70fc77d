"""litellm against a running server. Run by hand: python litellm_client.py URL

Checked with litellm 1.106.2 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the internet for prices

import litellm
from client_checks import WEATHER, Checks, Person

litellm.suppress_debug_info = True

checks = Checks("litellm", "openai")
COMMON: dict[str, Any] = {"api_base": checks.base_url, "api_key": "none", "temperature": 0, "max_tokens": 64}
CHAT = {**COMMON, "model": f"openai/{checks.model}"}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
        },
    },
}


def plain() -> str:
    answer = litellm.completion(**CHAT, messages=ASKED)
    assert answer.usage.total_tokens > 0
    return answer.choices[0].message.content


def streamed() -> str:
    chunks = list(litellm.completion(**CHAT, messages=ASKED, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert whole.choices[0].message.content == plain()
    return whole.choices[0].finish_reason


def asynchronous() -> str:
    return asyncio.run(litellm.acompletion(**CHAT, messages=ASKED)).choices[0].message.content


def hosted_vllm() -> str:
    """The provider that vLLM's users name."""
    answer = litellm.completion(**COMMON, model=f"hosted_vllm/{checks.model}", messages=ASKED, tools=[TOOL])
    return answer.choices[0].finish_reason


def tools(**choice: Any) -> str:
    answer = litellm.completion(**CHAT, messages=ASKED, tools=[TOOL], **choice)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    results = []
    for call in message.tool_calls:
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments).get("city") in ("Paris", "Oslo")
        results.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER})
    after = litellm.completion(**CHAT, messages=[*ASKED, message, *results], tools=[TOOL])
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")
    return call.function.arguments


def tools_streamed() -> str:
    stream = litellm.completion(
        **CHAT, messages=ASKED, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True
    )
    whole = litellm.stream_chunk_builder(list(stream), messages=ASKED)
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    assert whole.choices[0].finish_reason == "tool_calls"
    return call.function.arguments


def tools_auto() -> str:
    answer = litellm.completion(**CHAT, messages=ASKED, tools=[TOOL], tool_choice="auto", parallel_tool_calls=False)
    return answer.choices[0].finish_reason


def response_format() -> Person:
    answer = litellm.completion(**CHAT, messages=ASKED, response_format=Person)
    return Person.model_validate_json(answer.choices[0].message.content)


def json_object() -> Any:
    answer = litellm.completion(**CHAT, messages=ASKED, response_format={"type": "json_object"})
    finish = answer.choices[0].finish_reason
    return json.loads(answer.choices[0].message.content) if finish == "stop" else finish


def responses() -> str:
    answer = litellm.responses(
        model=f"openai/{checks.model}", api_base=checks.base_url, api_key="none", input="Hello", max_output_tokens=16
    )
    return answer.output[0].content[0].text


def responses_tools() -> str:
    tool = {"type": "function", **TOOL["function"], "strict": False}
    common = {"model": f"openai/{checks.model}", "api_base": checks.base_url, "api_key": "none", "tools": [tool]}
    answer = litellm.responses(**common, input=ASKED, tool_choice="required", temperature=0)
    call = answer.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    after = litellm.responses(**common, input=[*ASKED, call.model_dump(), result], max_output_tokens=16)
    assert after.status in ("completed", "incomplete")
    return call.arguments


def responses_streamed() -> list[str]:
    stream = litellm.responses(
        model=f"openai/{checks.model}",
        api_base=checks.base_url,
        api_key="none",
        input="Hello",
        max_output_tokens=16,
        stream=True,
    )
    kinds = [str(getattr(event.type, "value", event.type)) for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    return kinds


def anthropic_messages() -> str:
    answer = litellm.completion(
        model=f"anthropic/{checks.model}", api_base=checks.url, api_key="none", messages=ASKED, max_tokens=16
    )
    return answer.choices[0].message.content


def anthropic_tools() -> str:
    answer = litellm.completion(
        model=f"anthropic/{checks.model}",
        api_base=checks.url,
        api_key="none",
        messages=ASKED,
        max_tokens=64,
        tools=[TOOL],
        tool_choice="required",
    )
    return answer.choices[0].message.tool_calls[0].function.arguments


checks.check("completion", plain)
checks.check("completion, streamed", streamed)
checks.check("acompletion", asynchronous)
checks.check("hosted_vllm with tools", hosted_vllm)
checks.check("tools, required, and the result", lambda: tools(tool_choice="required", parallel_tool_calls=False))
checks.check(
    "tools, named, and the result",
    lambda: tools(tool_choice={"type": "function", "function": {"name": "get_weather"}}),
)
checks.check("tools, streamed", tools_streamed)
checks.check("tools, auto", tools_auto)
checks.check("response_format, a class", response_format)
checks.check("response_format, json_object", json_object)
checks.check("responses", responses)
checks.check("responses, tools and the result", responses_tools)
checks.check("responses, streamed", responses_streamed)
checks.check("anthropic provider", anthropic_messages)
checks.check("anthropic provider, tools", anthropic_tools)
checks.finish()
