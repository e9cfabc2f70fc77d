"""Where prompts are made: short ones on the spot, everything that may take long in a thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headway.server.prompts import ITEM_CHARS, SHORT_CHARS, PromptMaker
from headway.server.requests import ChatMessage
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
        (chat(SHORT_CHARS - ITEM_CHARS), {}, True),
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
    run(watched.maker.tokenize("x" * (SHORT_CHARS + 1), add_special_tokens=True))
    assert watched.in_loop == [True, False, False]


def test_the_first_request_finds_the_template_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    run(watched.maker.warm_up())
    (template,) = watched.maker.tokenizer._chat_templates.values()
    assert "_compiled" in vars(template)
    run(PromptMaker(None, num_threads=1).warm_up())  # nothing to do
