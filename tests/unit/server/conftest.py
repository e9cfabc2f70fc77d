"""The page in a real browser, against a pretended engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.server.browser import WIDE, chromium
from tests.unit.server.http_thread import serving
from tests.unit.server.scripted_engine import ScriptedEngine, create_app

PATIENCE_MS = 20_000
CLIPBOARD = ["clipboard-read", "clipboard-write"]


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


@pytest.fixture(scope="module")
def kept_page(browser: Any) -> Any:
    """One that is used again: a new one takes longer than what most cases do with it."""
    return _page_of(browser.new_context(permissions=CLIPBOARD))


@pytest.fixture
def open_page(browser: Any, kept_page: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page that must not complain in its console. Its storage is empty, as each server has an address of its
    own; the first without a script is the kept one."""
    pages: list[Any] = []
    kept_page.complaints.clear()

    def opened(
        url: str, *, scheme: str = "light", viewport: dict[str, int] = WIDE, expect: str = "serving", script: str = ""
    ) -> Any:
        page = kept_page
        if script or kept_page in pages:
            page = _page_of(browser.new_context(permissions=CLIPBOARD))
        pages.append(page)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=scheme)
        if script:
            page.add_init_script(script)
        page.goto(url)
        page.wait_for_function("(text) => document.querySelector('#health span').textContent === text", arg=expect)
        return page

    yield opened
    for page in pages:
        if page is kept_page:
            page.unroute_all()
            page.goto("about:blank")
        else:
            page.context.close()
    expected = ("Failed to load resource", "net::ERR_")  # a refusal, and a server that a test takes away
    complaints = [text for page in pages for text in page.complaints]
    assert [text for text in complaints if not any(each in text for each in expected)] == []


@pytest.fixture
def page(base_url: str, open_page: Callable[..., Any]) -> Any:
    return open_page(base_url)


def _page_of(context: Any) -> Any:
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda said: page.complaints.append(said.text) if said.type == "error" else None)
    return page
