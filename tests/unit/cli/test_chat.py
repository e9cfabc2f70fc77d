"""`headway chat`: history, commands, a context that overflows, and Ctrl-C."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest

from headway.cli import chat
from headway.cli.main import main
from tests.unit.cli.fake_engine import FakeEngine

Install = Callable[..., list[FakeEngine]]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a chat with these lines typed into it."""

    def run(*lines: str, flags: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return main(["chat", *flags])

    return run


def test_answers_go_to_stdout_and_into_the_history(
    fake_engine: Install, say: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engine(lambda prompt: f"answer{prompt.count('<user>')}")
    assert say("one", "", "two") == 0
    assert capsys.readouterr().out == "answer1\nanswer2\n"
    assert engines[0].prompts == [
        "<user>one<assistant>",
        "<user>one<assistant>answer1<user>two<assistant>",
    ]


def test_reset_forgets_and_system_starts_over(fake_engine: Install, say: Callable[..., int]) -> None:
    engines = fake_engine(lambda prompt: "ok")
    assert say("a", "/reset", "b", "/system be brief", "c", flags=("--system", "hello")) == 0
    assert engines[0].prompts == [
        "<system>hello<user>a<assistant>",
        "<system>hello<user>b<assistant>",
        "<system>be brief<user>c<assistant>",
    ]


def test_quit_ends_the_chat(fake_engine: Install, say: Callable[..., int]) -> None:
    engines = fake_engine(lambda prompt: "ok")
    assert say("/quit", "never asked") == 0
    assert engines[0].prompts == []


def test_commands_answer_on_stderr(
    fake_engine: Install, say: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine(lambda prompt: "ok")
    assert say("/help", "/system", "/rest") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "forget the conversation" in captured.err
    assert "System message: (none)" in captured.err
    assert "Unknown command '/rest'. Did you mean '/reset'?" in captured.err


def test_full_context_drops_the_oldest_exchange_with_a_notice(
    fake_engine: Install, say: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engine(lambda prompt: "y" * 20, max_model_len=120)
    assert say("first", "second", "third", flags=("--system", "S", "--max-tokens", "20")) == 0
    assert engines[0].prompts[-1] == f"<system>S<user>second<assistant>{'y' * 20}<user>third<assistant>"
    assert "The context is full: the oldest 1 exchange left the conversation." in capsys.readouterr().err


def test_question_that_can_never_fit_is_an_error_and_is_forgotten(
    fake_engine: Install, say: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engines = fake_engine(lambda prompt: "ok", max_model_len=64)
    assert say("x" * 100, "short") == 0
    captured = capsys.readouterr()
    assert "headway: error: The prompt has" in captured.err
    assert captured.out == "ok\n"
    assert engines[0].prompts == ["<user>short<assistant>"]


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    fake_engine: Install, say: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = fake_engine(lambda prompt: "abcdefghij" if "first" in prompt and "second" not in prompt else "ok")
    original = FakeEngine.step
    num_steps = 0

    def step(engine: FakeEngine) -> list[object]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            signal.raise_signal(signal.SIGINT)
        return original(engine)  # type: ignore[return-value]

    monkeypatch.setattr(FakeEngine, "step", step)
    before = signal.getsignal(signal.SIGINT)
    assert say("first", "second") == 0
    assert capsys.readouterr().out == "abcd [stopped]\nok\n"
    assert engines[0].prompts[-1] == "<user>first<assistant>abcd<user>second<assistant>"
    assert not engines[0].has_unfinished_requests()
    engines[0].check_invariants()
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_leaves(fake_engine: Install, say: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(lambda prompt: "abc")

    def hang(engine: FakeEngine) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(FakeEngine, "step", hang)
    assert say("first") == 130


def test_the_prompt_has_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def ask(prompt: str) -> NoReturn:
        shown.append(prompt)
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(chat, "_remember_history", lambda: None)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert list(chat._terminal_lines()) == []
    monkeypatch.setenv("NO_COLOR", "1")
    assert list(chat._terminal_lines()) == []
    assert "\x1b[" in shown[0] and shown[1] == "> "
