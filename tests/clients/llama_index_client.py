"""llama-index's OpenAILike against a running server. Run by hand: python llama_index_client.py URL

Checked with llama-index-llms-openai-like 0.8.1 (Python 3.11). The client is no dependency of the project: install it
elsewhere. No future annotations: it looks at those of the tool.
"""

import asyncio
from typing import Any, Literal

from client_checks import WEATHER, Checks, Person
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

checks = Checks("llama-index-llms-openai-like", "llama-index-core", "openai")


def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    return f"{city}: {WEATHER}"


def model(**more: Any) -> OpenAILike:
    return OpenAILike(
        model=checks.model,
        api_base=checks.base_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_tokens=96,
        temperature=0,
        max_retries=0,
        **more,
    )


TOOL = FunctionTool.from_defaults(get_weather)
ASKED = [ChatMessage(role="user", content="What is the weather in Paris?")]
TEMPLATE = PromptTemplate("Give the person {name}.")


def chat_streamed() -> str:
    *_, last = model().stream_chat(ASKED)
    assert last.message.content == model().chat(ASKED).message.content
    return last.message.content


def completion() -> str:
    return model(is_completion=True).complete("Once upon a time").text


def tools() -> Any:
    called = model().chat_with_tools([TOOL], chat_history=ASKED, tool_required=True, allow_parallel_tool_calls=False)
    calls = model().get_tool_calls_from_response(called)
    results = [
        ChatMessage(
            role="tool", content=get_weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}
        )
        for call in calls
    ]
    model().chat_with_tools([TOOL], chat_history=[*ASKED, called.message, *results])
    return [call.tool_kwargs for call in calls]


def tools_streamed() -> Any:
    *_, last = model().stream_chat_with_tools(
        [TOOL], chat_history=ASKED, tool_required=True, allow_parallel_tool_calls=False
    )
    return [get_weather(**call.tool_kwargs) for call in model().get_tool_calls_from_response(last)]


def predict_and_call() -> str:
    return str(model().predict_and_call([TOOL], user_msg="What is the weather in Paris?", tool_required=True))


def structured(**more: Any) -> Person:
    found = model(**more).structured_predict(Person, TEMPLATE, name="Ada")
    assert isinstance(found, Person)
    return found


def structured_streamed() -> Person:
    # By tools it would leave the choice to the model when it streams, and the smallest one would not call.
    by_schema = model(should_use_structured_outputs=True)
    *_, last = by_schema.stream_structured_predict(Person, TEMPLATE, name="Ada")
    return Person.model_validate(last.model_dump())


async def _agent() -> str:
    agent = FunctionAgent(tools=[TOOL], llm=model(), system_prompt="Be brief.")
    return str(await agent.run("What is the weather in Paris?"))


checks.check("chat", lambda: model().chat(ASKED).message.content)
checks.check("chat, streamed", chat_streamed)
checks.check("complete", completion)
checks.check("chat_with_tools and the result", tools)
checks.check("chat_with_tools, streamed", tools_streamed)
checks.check("predict_and_call", predict_and_call)
checks.check("structured_predict, by tool", structured)
checks.check("structured_predict, by schema", lambda: structured(should_use_structured_outputs=True))
checks.check("structured_predict, streamed", structured_streamed)
checks.check("as_structured_llm", lambda: model().as_structured_llm(Person).chat(ASKED).raw)
checks.check("FunctionAgent", lambda: asyncio.run(_agent()))
checks.finish()
