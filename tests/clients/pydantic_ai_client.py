"""pydantic-ai against a running server. Run by hand: python pydantic_ai_client.py URL

Checked with pydantic-ai 2.31.1 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from client_checks import WEATHER, AnyObject, Checks, Person
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

checks = Checks("pydantic-ai-slim", "openai")
PROVIDER = OpenAIProvider(base_url=checks.base_url, api_key="none")
MODELS = {
    "chat": OpenAIChatModel(checks.model, provider=PROVIDER),
    "responses": OpenAIResponsesModel(checks.model, provider=PROVIDER),
}
SETTINGS: Any = {"temperature": 0, "max_tokens": 96}
loop = asyncio.Runner()  # one for all checks: the client keeps its connections
ASKED = 'Say {"name": "Ada", "age": 36} as JSON, and nothing else.'


def output(model: str, output_type: Any) -> Any:
    agent = Agent(MODELS[model], output_type=output_type, model_settings=SETTINGS, retries=0)
    return agent.run_sync(ASKED).output


def tools(model: str) -> Any:
    """The model may call the tool, or not."""
    called = []
    agent = Agent(MODELS[model], model_settings={**SETTINGS, "parallel_tool_calls": False}, retries=1)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        called.append(city)
        return WEATHER

    return agent.run_sync("What is the weather in Paris?").output, called


def forced_tool(model: str) -> Any:
    """First the tool must be called, then, as it is gone, the output."""
    agent = Agent(MODELS[model], output_type=ToolOutput(Person, name="answer"), model_settings=SETTINGS, retries=1)
    called = []

    async def once(context: Any, definition: Any) -> Any:
        return None if called else definition

    @agent.tool_plain(prepare=once)
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        called.append(city)
        return WEATHER

    return agent.run_sync("What is the weather in Paris?").output, called


async def _streamed(model: str, output_type: Any) -> Any:
    agent = Agent(MODELS[model], output_type=output_type, model_settings=SETTINGS, retries=0)
    async with agent.run_stream(ASKED) as result:
        return [one async for one in result.stream_output()][-1]


for kind in MODELS:
    checks.check(f"{kind}: text", lambda kind=kind: output(kind, str))
    checks.check(f"{kind}: tool output", lambda kind=kind: output(kind, ToolOutput(Person)))
    checks.check(f"{kind}: native output", lambda kind=kind: output(kind, NativeOutput(Person)))
    checks.check(f"{kind}: prompted output", lambda kind=kind: output(kind, PromptedOutput(AnyObject)))
    checks.check(f"{kind}: two native outputs", lambda kind=kind: output(kind, NativeOutput([Person, AnyObject])))
    checks.check(f"{kind}: tools", lambda kind=kind: tools(kind))
    checks.check(f"{kind}: tools and tool output", lambda kind=kind: forced_tool(kind))
    checks.check(f"{kind}: text, streamed", lambda kind=kind: loop.run(_streamed(kind, str)))
    checks.check(f"{kind}: tool output, streamed", lambda kind=kind: loop.run(_streamed(kind, ToolOutput(Person))))
    checks.check(f"{kind}: native output, streamed", lambda kind=kind: loop.run(_streamed(kind, NativeOutput(Person))))
checks.finish()
