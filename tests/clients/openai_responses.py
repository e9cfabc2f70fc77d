"""OpenAI's Python client against /v1/responses of a running server. Run by hand: python openai_responses.py URL

Checked with openai 2.54.0 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

import json
import sys

import openai
from pydantic import BaseModel

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Person(BaseModel):
    """What `parse` asks for."""

    name: str
    age: int


def plain(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(
        model=model, input="Say hello.", instructions="Be brief.", max_output_tokens=64, temperature=0, store=False
    )
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text
    assert answer.store is False
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    print("plain:", answer.status, repr(answer.output_text), answer.usage.to_dict())
    cut = client.responses.create(model=model, input="Count to 100.", max_output_tokens=4, temperature=0)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    told = client.responses.create(
        model=model, input="Hi", max_output_tokens=3, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    print("logprobs:", [(each.token, len(each.top_logprobs)) for each in told.output[0].content[0].logprobs])


def streamed(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": "Say hello.", "max_output_tokens": 24, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == client.responses.create(**asked).output_text
    assert events[-1].type in ("response.completed", "response.incomplete")
    print("stream:", len(events), "events,", events[-1].type, repr(text))


def tools(client: openai.OpenAI, model: str) -> None:
    asked = {
        "model": model,
        "input": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 64,
        "temperature": 0,
    }
    answer = client.responses.create(**asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == call.arguments
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    print("tools:", call.name, call.arguments, f"in {len(deltas)} deltas")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    turns = [*asked["input"], *(item.to_dict() for item in answer.output), result]
    after = client.responses.create(**asked | {"input": turns, "tool_choice": "none"})
    print("after the result:", repr(after.output_text))
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    assert client.responses.create(**asked | {"tool_choice": allowed}).output[-1].type == "function_call"


def tools_of_an_agent(client: openai.OpenAI, model: str) -> None:
    """As Codex sends them: in a namespace, with text as input, and one that only OpenAI can run."""
    weather = {key: value for key, value in TOOL.items() if key != "strict"}
    asked = {
        "model": model,
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
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    turns = [*asked["input"], call.to_dict(), result]
    custom = asked | {"input": turns, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    patch = client.responses.create(**custom).output[-1]
    assert (patch.type, patch.name, patch.namespace) == ("custom_tool_call", "apply_patch", None)
    with client.responses.stream(**custom) as stream:
        kinds = [event.type for event in stream]
    assert "response.custom_tool_call_input.done" in kinds
    print("agent:", call.namespace, call.name, call.arguments, "|", repr(patch.input[:40]))


def counted(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": "Say hello.", "instructions": "Be brief."}
    number = client.responses.input_tokens.count(**asked).input_tokens
    assert number == client.responses.create(**asked, max_output_tokens=1).usage.input_tokens
    print("input_tokens:", number)


def parsed(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": "Ada is 36 years old. Who is it?", "max_output_tokens": 128, "temperature": 0}
    answer = client.responses.parse(**asked, text_format=Person)
    assert isinstance(answer.output_parsed, Person)
    with client.responses.stream(**asked, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    print("parse:", answer.output_parsed)


def refused(client: openai.OpenAI, model: str) -> None:
    for extra in (
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"store": True},
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"extra_body": {"colour": 1}},
    ):
        try:
            client.responses.create(model=model, input="Hi", **extra)
        except openai.BadRequestError as error:
            print("refused:", error.body["param"], "|", error.body["message"])
        else:
            raise AssertionError(extra)
    try:
        client.responses.retrieve("resp_1")
    except openai.NotFoundError as error:
        print("retrieve:", error.body["message"])
    else:
        raise AssertionError("there is nothing to retrieve")


def main() -> None:
    client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    for check in (plain, streamed, tools, tools_of_an_agent, counted, parsed, refused):
        if sys.argv[2:] in ([], [check.__name__]):
            check(client, model)
    print("openai", openai.__version__, "done")


if __name__ == "__main__":
    main()
