"""Conversations with tools as prompts: what `LLM.chat`, `AsyncLLM.chat` and the server have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.errors import InvalidRequestError
from headway.structured.conversation import chat_text, tools_from
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway.structured.tool_schemas import MAX_NESTING, is_too_deep
from headway.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.unit.tokenizer.small import byte_level_metadata

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
KNOWING = (
    "{% for t in tools or [] %}<{{ t.function.name }}{{ t.function.description }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}{{ c.function.arguments.x + 1 }}"
    "{% endfor %}{{ m.content }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Hi"}


def tokenizer_with(**templates: str) -> Tokenizer:
    names = {
        f"tokenizer.chat_template{f'.{name}' if name != 'default' else ''}": text for name, text in templates.items()
    }
    return tokenizer_from_gguf(byte_level_metadata(pre="gpt-2", **names))


def assistant(arguments: Any, content: str | None = None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


def test_without_tools_the_template_has_the_messages_as_they_are() -> None:
    assert chat_text(tokenizer_with(default=PLAIN), [USER]) == "[user]Hi"
    assert chat_text(tokenizer_with(default="{{ greeting }}"), [USER], greeting="Ho") == "Ho"


@pytest.mark.parametrize("arguments", ['{"x": 2}', {"x": 2}])
def test_arguments_are_objects(arguments: Any) -> None:
    text = chat_text(tokenizer_with(default=KNOWING), [USER, assistant(arguments, "")], tools=tools_from(TOOLS))
    assert text == "<f>[user]Hi[assistant]3"


def test_the_template_for_tools_is_looked_at() -> None:
    tokenizer = tokenizer_with(default=PLAIN, tool_use=KNOWING)
    assert chat_text(tokenizer, [USER], tools=tools_from(TOOLS)) == "<f>[user]Hi"


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_format_writes_what_the_template_does_not(name: str) -> None:
    form, tools = TOOL_FORMATS[name], tools_from(TOOLS)
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]}
    text = chat_text(
        tokenizer_with(default=PLAIN), [USER, assistant({}, "So:"), result, USER], tools=tools, tool_format=form
    )
    assert text.startswith(f"[system]{form.instructions(tools)}[user]Hi[assistant]So:\n")
    assert text.endswith(f"[user]{form.write_result('7')}[user]Hi")


def test_messages_are_not_changed() -> None:
    messages = [{"role": "system", "content": "S"}, assistant('{"x": 1}')]
    before = repr(messages)
    chat_text(tokenizer_with(default=PLAIN), messages, tools=tools_from(TOOLS))
    assert repr(messages) == before


NAMELESS = {"function": {"arguments": {}}}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("made", "param"),
    [
        (lambda: assistant_with("f"), "messages[0].tool_calls[0]"),
        (lambda: assistant_with(NAMELESS), "messages[0].tool_calls[0]"),
        (lambda: assistant_with({"function": {"name": "f"}}), ARGUMENTS),
        (lambda: assistant_with({"function": {"name": "f", "arguments": [1]}}), ARGUMENTS),
        (lambda: tools_from(["f"]), "tools[0].function"),  # type: ignore[list-item]
        (lambda: tools_from([{"function": {"name": ""}}]), "tools[0].function.name"),
        (lambda: tools_from([{"function": {"name": "f", "parameters": [1]}}]), "tools[0].function.parameters"),
    ],
)
def test_calls_and_tools_that_are_none_are_refused(made: Callable[[], object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made()
    assert caught.value.param == param


def assistant_with(call: Any) -> str:
    return chat_text(tokenizer_with(default=PLAIN), [{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_depth() -> None:
    value: dict[str, Any] = {}
    for _ in range(MAX_NESTING - 1):
        value = {"a": [1], "b": value}
    assert not is_too_deep(value)
    assert is_too_deep({"c": value})


@pytest.mark.parametrize("content", ["Sure", "i", "two\nlines  ", "_end", " "])
def test_the_last_message_is_continued(content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|i_end|>\n{% endfor %}"
    kept = chat_text(tokenizer_with(default=template), messages, continue_final_message=True)
    assert kept == f"[user]Hi<|i_end|>\n[assistant]{content}"
    trimmed = template.replace("m.content", "m.content | trim")
    cut = chat_text(tokenizer_with(default=trimmed), messages, continue_final_message=True)
    assert cut == f"[user]Hi<|i_end|>\n[assistant]{content}".rstrip()


def test_the_last_message_is_continued_after_tools() -> None:
    messages = [USER, assistant({"x": 1}, ""), {"role": "tool", "content": "7"}, {"role": "assistant", "content": "So"}]
    for template in (PLAIN, KNOWING):
        text = chat_text(
            tokenizer_with(default=template), messages, tools=tools_from(TOOLS), continue_final_message=True
        )
        assert text.endswith("[assistant]So")


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued") as refused:
        chat_text(tokenizer_with(default="{{ messages[0].content }}"), [USER, USER], continue_final_message=True)
    assert refused.value.param == "continue_final_message"
