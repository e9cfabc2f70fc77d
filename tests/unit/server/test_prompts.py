"""Where prompts are made: short ones on the spot, everything that may take long in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headway.errors import RequestTooLargeError
from headway.server.api.api_errors import ApiError
from headway.server.api.chat_messages import ChatMessage
from headway.server.api.prompts import PromptMaker
from headway.server.limits import LIMITS
from headway.tokenizer.tokenizer import LONG_CHARS, SHORT_CHARS
from tests.unit.server.fake_engine import engine_ready, run, small_tokenizer

INFO = engine_ready(max_model_len=100_000)


class Watched:
    """A prompt maker that notes in which thread it tokenises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = small_tokenizer()
        self.maker = PromptMaker(tokenizer, num_threads=1)
        self.in_loop: list[bool] = []
        encode = tokenizer.encode
        decode = tokenizer.decode

        def watch(work: Any) -> Any:
            def watched(*args: Any, **options: Any) -> Any:
                self.in_loop.append(threading.current_thread() is threading.main_thread())
                return work(*args, **options)

            return watched

        monkeypatch.setattr(tokenizer, "encode", watch(encode))
        monkeypatch.setattr(tokenizer, "decode", watch(decode))


def chat(num_chars: int, **fields: Any) -> list[ChatMessage]:
    return [ChatMessage(role="user", content="x" * num_chars, **fields)]


@pytest.mark.parametrize(
    ("messages", "options", "on_the_spot"),
    [
        (chat(SHORT_CHARS - LIMITS.item_chars), {}, True),
        (chat(SHORT_CHARS), {}, False),
        (chat(1, name="x" * SHORT_CHARS), {}, False),
        (chat(1) * 10, {}, False),
        (chat(1), {"anything": "x" * 10**6}, False),
    ],
)
def test_messages(
    monkeypatch: pytest.MonkeyPatch, messages: list[ChatMessage], options: dict[str, Any], on_the_spot: bool
) -> None:
    watched = Watched(monkeypatch)
    run(watched.maker.from_messages(messages, INFO, template_options=options))
    assert watched.in_loop == [on_the_spot]


@pytest.mark.parametrize(
    ("texts", "on_the_spot"), [(["x" * SHORT_CHARS], True), (["x" * (SHORT_CHARS + 1)], False), (["x"] * 10, False)]
)
def test_texts(monkeypatch: pytest.MonkeyPatch, texts: list[str], on_the_spot: bool) -> None:
    watched = Watched(monkeypatch)
    prompts = run(watched.maker.from_texts(texts, INFO))
    assert [prompt.text for prompt in prompts] == texts
    assert watched.in_loop == [on_the_spot] * len(texts)


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    run(watched.maker.decode([300] * SHORT_CHARS, INFO))
    run(watched.maker.decode([300] * (SHORT_CHARS + 1), INFO))
    run(watched.maker.tokenize("x" * (SHORT_CHARS + 1), INFO, add_special_tokens=True))
    assert watched.in_loop == [True, False, False]


async def test_ordinary_prompts_do_not_wait_behind_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    maker = PromptMaker(tokenizer, num_threads=1)
    encode, go_on = tokenizer.encode, threading.Event()

    def wait_if_long(text: str, **options: Any) -> list[int]:
        assert len(text) <= LONG_CHARS or go_on.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", wait_if_long)
    texts = ["x" * (LONG_CHARS + 1)] * 5
    long = [asyncio.create_task(maker.tokenize(text, INFO, add_special_tokens=True)) for text in texts]
    (prompt,) = await maker.from_texts(["y" * LONG_CHARS], INFO)
    assert prompt.text == "y" * LONG_CHARS and not any(task.done() for task in long)
    go_on.set()
    await asyncio.gather(*long)


@pytest.mark.parametrize("make", ["tokenize", "from_texts", "from_messages", "options", "decode"])
def test_a_text_that_is_too_long_is_refused_before_it_is_tokenised(make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    maker, info = watched.maker, engine_ready(max_model_len=1000)
    most = 1000 * maker._chars_per_token
    too_long = f"length is 1000 tokens. However, .* {most} characters, .* has {most + 1}"
    calls: dict[str, tuple[Callable[[int], Awaitable[Any]], str]] = {
        "tokenize": (lambda size: maker.tokenize("x" * size, info, add_special_tokens=True), too_long),
        "from_texts": (lambda size: maker.from_texts(["a", "x" * size], info), too_long),
        "from_messages": (lambda size: maker.from_messages(chat(size), info), too_long),
        "options": (lambda size: maker.from_messages(chat(1), info, template_options={"some": "x" * size}), "at most"),
        "decode": (lambda size: maker.decode([300] * size, info), f"at most 32000 ids; there are {most + 1}"),
    }
    work, told = calls[make]
    with pytest.raises((ApiError, RequestTooLargeError), match=told):
        run(work(most + 1))
    assert watched.in_loop == []
    if make == "tokenize":
        assert len(run(work(most))) == most, "more tokens than the context has"


def test_no_text_has_more_than_32_characters_per_token() -> None:
    tokenizer = small_tokenizer()
    tokenizer.backend.add_tokens(["-" * 200])
    assert PromptMaker(tokenizer, num_threads=1)._chars_per_token == 32


def test_the_first_request_finds_the_template_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    run(watched.maker.warm_up())
    (template,) = watched.maker.tokenizer._chat_templates.values()
    assert "_compiled" in vars(template)
    run(PromptMaker(None, num_threads=1).warm_up())  # nothing to do
