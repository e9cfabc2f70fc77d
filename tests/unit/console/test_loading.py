"""Starting an engine: a bar on a terminal, nothing but the plan elsewhere if it is quick, silence when asked."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from headway.config import EngineConfig
from headway.console.loading import load_engine
from headway.engine.llm_engine import LLMEngine


class StubEngine:
    plan = "weights 1 MiB\nKV cache 2 MiB"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int, int], None] | None]:
    """The progress callbacks that the engine was given."""
    seen: list[Callable[[int, int], None] | None] = []

    def from_config(config: EngineConfig, *, progress: Callable[[int, int], None] | None = None) -> StubEngine:
        seen.append(progress)
        if progress is not None:
            for done in range(0, 101, 50):
                progress(done * 2**20, 100 * 2**20)
        return StubEngine()

    monkeypatch.setattr(LLMEngine, "from_config", from_config)
    return seen


def load(*, terminal: bool, quiet: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, highlight=False)
    assert isinstance(load_engine(EngineConfig(), console, quiet=quiet), StubEngine)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_terminal_shows_progress_and_then_the_plan(calls: list[object]) -> None:
    text = load(terminal=True)
    assert "Loading weights, 100 MiB" in text
    assert "KV cache 2 MiB" in text
    assert text.index("Loading weights") < text.index("KV cache")


def test_elsewhere_only_the_plan_is_printed(calls: list[object]) -> None:
    text = load(terminal=False)
    assert text.startswith("weights 1 MiB\nKV cache 2 MiB\nReady in ")
    assert "\x1b" not in text


def test_quiet_prints_nothing(calls: list[object]) -> None:
    assert load(terminal=False, quiet=True) == ""
