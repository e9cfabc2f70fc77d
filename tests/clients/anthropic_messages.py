"""Anthropic's Python client against /v1/messages of a running server. Run by hand: python anthropic_messages.py URL

Checked with anthropic 2.10.0 (Python 3.11). The client is no dependency of the project: install it elsewhere. What
every client does (tools, counting, refusals) is in anthropic_messages.mjs; here is what only this one does.
"""

from __future__ import annotations

from typing import Any

import anthropic
from client_checks import Checks, Person

checks = Checks("anthropic")
client = anthropic.Anthropic(base_url=checks.url, api_key="none", max_retries=0)


def asked(text: str, max_tokens: int = 64, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": checks.model, "max_tokens": max_tokens, "messages": messages, **more}


def streamed() -> Any:
    greedy = asked("Say hello.", 24, system="Be brief.", metadata={"user_id": "ada"}, extra_body={"temperature": 0})
    with client.messages.stream(**greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**greedy)
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    return final.stop_reason, text


def stopped() -> Any:
    long = asked("Count from one to one hundred.", stop_sequences=["e"], extra_body={"temperature": 0})
    answer = client.messages.create(**long)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "e")
    return answer.content


def cached() -> Any:
    system = [{"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first, second = (client.messages.create(**asked("Hi", 4, system=system)).usage for _ in range(2))
    assert second.cache_read_input_tokens > 0
    return first.to_dict(), second.to_dict()


def parsed() -> Any:
    question = asked("Ada is 36 years old. Who is it?", 128, output_format=Person, extra_body={"temperature": 0})
    answer = client.messages.parse(**question).parsed_output
    assert isinstance(answer, Person)
    return answer


def run_by_the_client() -> Any:
    """The runner asks for a thread, and goes on without one. The smallest model need not call anything."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"{city}: sunny, 21 degrees."

    question = asked("What is the weather in Paris?", tools=[get_weather], max_iterations=2)
    turns = [turn.stop_reason for turn in client.beta.messages.tool_runner(**question)]
    assert turns
    return turns


def too_long() -> str:
    """9,000 words must not fit into the context."""
    try:
        client.messages.create(**asked("word " * 9000, 4))
    except anthropic.BadRequestError as error:
        message: str = error.body["error"]["message"]
    assert message.startswith("prompt is too long: ")
    return message


for check in (streamed, stopped, cached, parsed, run_by_the_client, too_long):
    checks.check(check.__name__, check)
checks.finish()
