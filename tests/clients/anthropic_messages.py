"""Anthropic's Python client against /v1/messages of a running server. Run by hand: python anthropic_messages.py URL

Checked with anthropic 2.10.0 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

import sys

import anthropic
from pydantic import BaseModel

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Person(BaseModel):
    """What `parse` asks for."""

    name: str
    age: int


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def plain(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.create(
        model=model,
        max_tokens=64,
        system="Be brief.",
        messages=question("Say hello."),
        extra_body={"temperature": 0},
        metadata={"user_id": "ada"},
    )
    assert answer.type == "message"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.content[0].text
    print("plain:", answer.stop_reason, repr(answer.content[0].text), answer.usage.to_dict())
    long = question("Count from one to one hundred.")
    cut = client.messages.create(model=model, max_tokens=4, messages=long)
    assert cut.stop_reason == "max_tokens"
    stop = client.messages.create(
        model=model, max_tokens=64, messages=long, stop_sequences=["e"], extra_body={"temperature": 0}
    )
    assert (stop.stop_reason, stop.stop_sequence) == ("stop_sequence", "e")


def streamed(client: anthropic.Anthropic, model: str) -> None:
    asked = {
        "model": model,
        "max_tokens": 24,
        "messages": question("Say hello."),
        "extra_body": {"temperature": 0},
    }
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    print("stream:", final.stop_reason, repr(text), final.usage.to_dict())


def cached(client: anthropic.Anthropic, model: str) -> None:
    system = [{"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    asked = {"model": model, "max_tokens": 4, "system": system, "messages": question("Hi")}
    first, second = (client.messages.create(**asked).usage for _ in range(2))
    assert second.cache_read_input_tokens > 0
    print("cache:", first.to_dict(), second.to_dict())


def counted(client: anthropic.Anthropic, model: str) -> None:
    messages = question("Say hello.")
    number = client.messages.count_tokens(model=model, messages=messages, system="Be brief.").input_tokens
    usage = client.messages.create(model=model, max_tokens=1, messages=messages, system="Be brief.").usage
    assert number == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    with_tools = client.messages.count_tokens(model=model, messages=messages, tools=[TOOL]).input_tokens
    assert with_tools > number
    print("count_tokens:", number, "with a tool:", with_tools)


def tools(client: anthropic.Anthropic, model: str) -> None:
    messages = question("What is the weather in Paris?")
    asked = {
        "model": model,
        "max_tokens": 64,
        "messages": messages,
        "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0},
    }
    answer = client.messages.create(**asked)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert call.input["city"] in ("Paris", "Oslo")
    with client.messages.stream(**asked) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        final = stream.get_final_message()
    assert final.content[-1].input == call.input
    print("tools:", call.name, call.input, kinds.count("input_json_delta"), "deltas")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    turns = [
        *messages,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    after = client.messages.create(**asked | {"messages": turns, "tool_choice": {"type": "none"}})
    print("after the result:", repr(after.content[0].text))
    named = client.messages.create(**asked | {"tool_choice": {"type": "tool", "name": "get_weather"}})
    assert named.content[-1].type == "tool_use"


def parsed(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.parse(
        model=model,
        max_tokens=128,
        messages=question("Ada is 36 years old. Who is it?"),
        output_format=Person,
        extra_body={"temperature": 0},
    )
    assert isinstance(answer.parsed_output, Person)
    print("parse:", answer.parsed_output)


def run_by_the_client(client: anthropic.Anthropic, model: str) -> None:
    """The runner asks for a thread, and goes on without one. The smallest model need not call anything."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"{city}: sunny, 21 degrees."

    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=64,
        tools=[get_weather],
        messages=question("What is the weather in Paris?"),
        max_iterations=2,
    )
    turns = [turn.stop_reason for turn in runner]
    assert turns
    print("tool_runner:", turns)


def too_long(client: anthropic.Anthropic, model: str) -> None:
    try:
        client.messages.create(model=model, max_tokens=4, messages=question("word " * 9000))
    except anthropic.BadRequestError as error:
        message = error.body["error"]["message"]
    else:
        raise AssertionError("9,000 words fit into the context: start the server with a smaller --max-model-len")
    assert message.startswith("prompt is too long: ")
    print("too long:", message)


def refused(client: anthropic.Anthropic, model: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for extra in (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"messages": [{"role": "user", "content": [image]}]},
        {"extra_body": {"colour": 1}},
    ):
        try:
            client.messages.create(**{"model": model, "max_tokens": 4, "messages": question("Hi")} | extra)
        except anthropic.BadRequestError as error:
            print("refused:", error.body["error"])
        else:
            raise AssertionError(extra)
    try:
        client.messages.create(model="other", max_tokens=4, messages=question("Hi"))
    except anthropic.NotFoundError as error:
        print("refused:", error.body["error"], error.request_id)
    else:
        raise AssertionError("there is no such model")


def main() -> None:
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    model = sys.argv[2] if len(sys.argv) > 2 else client.models.list().data[0].id
    for check in (plain, streamed, cached, counted, tools, parsed, run_by_the_client, too_long, refused):
        if sys.argv[3:] in ([], [check.__name__]):
            check(client, model)
    print("anthropic", anthropic.__version__, "done")


if __name__ == "__main__":
    main()
