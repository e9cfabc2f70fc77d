"""openai-agents against a running server. Run by hand: python openai_agents_client.py URL

Checked with openai-agents 0.20.0 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from client_checks import WEATHER, Checks, Person
from openai import AsyncOpenAI

checks = Checks("openai-agents", "openai")
client = AsyncOpenAI(base_url=checks.base_url, api_key="none", max_retries=0)
set_default_openai_client(client)
set_tracing_disabled(True)
MODELS: dict[str, Any] = {
    "default": checks.model,
    "responses": OpenAIResponsesModel(checks.model, client),
    "chat": OpenAIChatCompletionsModel(checks.model, client),
}
called: list[str] = []
loop = asyncio.Runner()  # one for all checks: the client keeps its connections


@function_tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    called.append(city)
    return f"{city}: {WEATHER}"


def agent(kind: str, **more: Any) -> Agent:
    choice = {"tool_choice": "required", "parallel_tool_calls": False} if "tools" in more else {}
    settings = ModelSettings(temperature=0, max_tokens=64, **choice)
    return Agent(name="Assistant", instructions="Be brief.", model=MODELS[kind], model_settings=settings, **more)


def run(kind: str, **more: Any) -> Any:
    return loop.run(Runner.run(agent(kind, **more), "What is the weather in Paris?")).final_output


def tools(kind: str) -> Any:
    called.clear()
    answer = run(kind, tools=[get_weather])
    assert called, "the tool was not called"
    return called, answer


async def _streamed(kind: str, asked: str = "What is the weather in Paris?", **more: Any) -> Any:
    result = Runner.run_streamed(agent(kind, **more), asked)
    kinds = [event.type async for event in result.stream_events()]
    return len(kinds), result.final_output


def tools_streamed(kind: str) -> Any:
    called.clear()
    answer = loop.run(_streamed(kind, tools=[get_weather]))
    assert called, "the tool was not called"
    return answer


def handoff(kind: str) -> Any:
    other = agent(kind)
    first = Agent(
        name="Triage",
        model=MODELS[kind],
        handoffs=[other],
        model_settings=ModelSettings(temperature=0, max_tokens=64, tool_choice="required", parallel_tool_calls=False),
    )
    result = loop.run(Runner.run(first, "What is the weather in Paris?"))
    assert result.last_agent.name == "Assistant"
    return result.final_output


def parsed(kind: str) -> Person:
    answer = run(kind, output_type=Person)
    assert isinstance(answer, Person)
    return answer


for name in MODELS:
    checks.check(f"{name}: text", lambda name=name: run(name))
    checks.check(f"{name}: text, streamed", lambda name=name: loop.run(_streamed(name, "Say hello.")))
    checks.check(f"{name}: function tool and its result", lambda name=name: tools(name))
    checks.check(f"{name}: function tool, streamed", lambda name=name: tools_streamed(name))
    checks.check(f"{name}: handoff", lambda name=name: handoff(name))
    checks.check(f"{name}: output_type", lambda name=name: parsed(name))
checks.finish()
