"""Commands run against a fake engine; loading a real one fails the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.config import EngineConfig
from headway.console import loading
from tests.unit.cli.fake_engine import FakeEngine


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeEngine]]:
    """Call it with an answer function: commands then load a `FakeEngine`. Returns the list of engines loaded."""

    def install(answer: Callable[[str], str], **options: int) -> list[FakeEngine]:
        engines: list[FakeEngine] = []

        def load(config: EngineConfig, console: object, *, quiet: bool = False) -> FakeEngine:
            engines.append(FakeEngine(config, answer, **options))
            return engines[-1]

        monkeypatch.setattr(loading, "load_engine", load)
        return engines

    return install
