"""The page in a real browser, against a pretended engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.server.browser import WIDE, chromium
from tests.unit.server.http_thread import serving
from tests.unit.server.scripted_engine import ScriptedEngine, create_app

PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(step_s=0.004)


@pytest.fixture
def app(engine: ScriptedEngine) -> Any:
    return create_app(engine)


@pytest.fixture
def base_url(app: Any) -> Iterator[str]:
    with serving(app) as url:
        yield url


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page that must not complain in its console."""
    complaints: list[str] = []
    contexts = []

    def opened(
        url: str,
        *,
        scheme: str = "light",
        viewport: dict[str, int] = WIDE,
        expect: str = "serving",
        script: str = "",
        **options: Any,
    ) -> Any:
        context = browser.new_context(color_scheme=scheme, viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        if script:
            page.add_init_script(script)
        page.goto(url)
        page.wait_for_function("(text) => document.querySelector('#health span').textContent === text", arg=expect)
        return page

    yield opened
    for context in contexts:
        context.close()
    expected = ("Failed to load resource", "net::ERR_")  # a refusal, and a server that a test takes away
    assert [text for text in complaints if not any(each in text for each in expected)] == []
