"""How far a long command is, where stderr is no terminal: lines, with the time that is left."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from headway import progress
from headway.cli.main import main
from headway.progress import ProgressLines, meter, progress_bar
from tests.lab.bench.sse_server import Answer, SSEServer, steady
from tests.unit.clock import Clock


@pytest.mark.parametrize(
    ("given", "at", "line"),
    [
        ((50, "8/s", "requests"), (0,), "8/s: 0 of 50 requests (0%), 10 s"),
        ((50, "8/s", "requests"), (10,), "8/s: 10 of 50 requests (20%), 10 s, about 40 s left"),
        ((50, "8/s", "requests"), (50,), "8/s: 50 of 50 requests (100%), 10 s"),
        ((100, "x"), (4,), "x: 4%, 10 s"),
        ((100, "x"), (5,), "x: 5%, 10 s, about 3 min 10 s left"),
        ((None, "Reading", "lines"), (3000,), "Reading: 3,000 lines, 10 s"),
        ((None, "Reading", "lines"), (3000, 6000), "Reading: 3,000 of 6,000 lines (50%), 10 s, about 10 s left"),
        ((None, "Fetching", "bytes"), (2_300_000, 93_000_000), "Fetching: 2 of 93 MB (2%), 10 s"),
    ],
)
def test_lines(given: tuple[Any, ...], at: tuple[int, ...], line: str) -> None:
    clock = Clock()
    lines = ProgressLines(*given, now=clock)
    clock.now_s += 10
    lines.at(*at)
    assert lines.line == line


def test_only_the_innermost_of_two_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What goes on inside takes the time: the outer one would say for minutes that nothing happens."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.005)
    with meter(None, "Loading") as outer:
        outer.advance()
        with progress.first_use("Compiling: this happens once.", "Compiling") as inner:
            capsys.readouterr()
            inner.at(1, 2)
            seen = ""
            while seen.count("Compiling: 50%") < 3:
                seen += capsys.readouterr().err
            assert "Loading" not in seen
        while "Loading: 1, " not in seen:
            seen += capsys.readouterr().err
    assert "Compiling: done in 0 s" in seen


def test_lines_come_while_nothing_moves_and_end_with_the_work() -> None:
    written: list[str] = []
    is_there = threading.Event()

    def write(line: str) -> None:
        written.append(line)
        if len(written) == 2:
            is_there.set()

    with ProgressLines(1, "slow", now=Clock()).shown(write, every_s=0.001):
        assert is_there.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
    assert set(written) == {"slow: 0%, 0 s"}


class Terminal:
    """A stderr that is one, or is none."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self.text = ""
        self.has_text = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        if text.strip():
            self.has_text.set()
        return len(text)

    def flush(self) -> None:
        pass


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)


def test_a_redirected_command_says_how_far_it_is(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    redirected = Terminal(is_terminal=False)
    monkeypatch.setattr("sys.stderr", redirected)
    with progress_bar(3, "load", is_shown=False) as shown:
        shown.advance()
        assert not redirected.has_text.wait(0.05), "quiet where that is asked for"
    with progress_bar(3, "load") as shown:
        shown.advance()
        assert redirected.has_text.wait(30)
    assert "load: " in redirected.text and " of 3 requests" in redirected.text
    assert "\r" not in redirected.text and "\x1b" not in redirected.text


def test_a_terminal_has_a_bar(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(is_terminal=True)
    monkeypatch.setattr("sys.stderr", terminal)
    with meter(1.0, "Calibrating") as shown:
        shown.at(0.5)
    assert "Calibrating" in terminal.text and "\r" in terminal.text and "left" not in terminal.text


def test_a_load_says_how_far_it_is(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    redirected = Terminal(is_terminal=False)

    def answer_when_a_line_is_there(body: dict[str, Any]) -> Answer:
        return steady(body, first_s=0.0 if redirected.has_text.is_set() else 0.2)

    monkeypatch.setattr("sys.stderr", redirected)
    sizes = ["--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2"]
    with SSEServer(answer_when_a_line_is_there) as server:
        assert main(["bench", "serve", "--base-url", server.url, *sizes]) == 0
        assert main(["bench", "sweep", "--base-url", server.url, *sizes, "--rates", "10"]) == 0
    assert re.search(r"(?m)^Progress: \d of 2 requests \(\d+%\), \d+ s", redirected.text)
    assert re.search(r"(?m)^10/s \(1 of 1\): \d of 2 requests", redirected.text)


def test_no_command_has_a_bar_of_its_own() -> None:
    """Which would say nothing where there is no terminal."""
    folder = Path(progress.__file__).parent
    with_bars = {file.name for file in folder.glob("*.py") if "tqdm import" in file.read_text()}
    assert with_bars == {"progress.py"}
