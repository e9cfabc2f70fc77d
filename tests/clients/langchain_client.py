"""langchain-openai against a running server. Run by hand: python langchain_client.py URL

Checked with langchain-openai 1.7.3 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from client_checks import WEATHER, AnyObject, Checks, Person
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

checks = Checks("langchain-openai", "langchain-core", "openai")


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    return f"{city}: {WEATHER}"


def model(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=checks.base_url,
        api_key="none",
        model=checks.model,
        temperature=0,
        max_tokens=96,
        max_retries=0,
        **more,
    )


ASKED = [SystemMessage("Be brief."), HumanMessage("What is the weather in Paris?")]


def plain() -> str:
    answer = model().invoke(ASKED)
    assert answer.usage_metadata["output_tokens"] > 0
    return answer.content


def streamed() -> str:
    chunks = list(model(stream_usage=True).stream(ASKED))
    assert "".join(chunk.content for chunk in chunks) == plain()
    return f"{len(chunks)} chunks"


def asynchronous() -> str:
    return asyncio.run(model().ainvoke(ASKED)).content


def tools(choice: str, **more: Any) -> Any:
    bound = model(**more).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    called = bound.invoke(ASKED)
    assert called.tool_calls and not called.invalid_tool_calls
    results = [get_weather.invoke(call) for call in called.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    model(**more).bind_tools([get_weather]).invoke([*ASKED, called, *results])
    return [call["args"] for call in called.tool_calls]


def tools_streamed(**more: Any) -> Any:
    whole: Any = None
    for chunk in (
        model(**more).bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).stream(ASKED)
    ):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    get_weather.invoke(call)
    return call["args"]


def tools_auto() -> Any:
    return model().bind_tools([get_weather], strict=True, parallel_tool_calls=False).invoke(ASKED).tool_calls


def structured(schema: Any, method: str, **more: Any) -> Any:
    answer = model().with_structured_output(schema, method=method, include_raw=True, **more)
    found = answer.invoke([HumanMessage('Say {"name": "Ada"} as JSON, and nothing else.')])
    assert found["parsing_error"] is None, found
    assert isinstance(found["parsed"], schema if isinstance(schema, type) else dict), found
    return found["parsed"]


def structured_streamed() -> Any:
    *_, last = model().with_structured_output(Person, method="json_schema").stream(ASKED)
    return Person.model_validate(last, from_attributes=True)


checks.check("invoke", plain)
checks.check("stream", streamed)
checks.check("ainvoke", asynchronous)
checks.check("bind_tools, required, and the result", lambda: tools("required"))
checks.check("bind_tools, 'any'", lambda: tools("any"))
checks.check("bind_tools, named", lambda: tools("get_weather"))
checks.check("bind_tools, streamed", tools_streamed)
checks.check("bind_tools, auto and strict", tools_auto)
checks.check("structured, function_calling", lambda: structured(Person, "function_calling"))
checks.check("structured, function_calling, strict", lambda: structured(Person, "function_calling", strict=True))
checks.check("structured, json_mode", lambda: structured(AnyObject, "json_mode"))
checks.check("structured, json_schema", lambda: structured(Person, "json_schema"))
checks.check(
    "structured, json_schema from a dict",
    lambda: structured({**Person.model_json_schema(), "additionalProperties": False}, "json_schema", strict=True),
)
checks.check("structured, streamed", structured_streamed)
checks.check("responses API", lambda: model(use_responses_api=True).invoke(ASKED).text)
checks.check("responses API, tools", lambda: tools("required", use_responses_api=True))
checks.check("responses API, tools, streamed", lambda: tools_streamed(use_responses_api=True))
checks.check(
    "responses API, structured",
    lambda: Person.model_validate(model(use_responses_api=True).with_structured_output(Person).invoke(ASKED)),
)
checks.finish()
