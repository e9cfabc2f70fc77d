"""The page in a real browser, against a pretended engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.server.browser import PHONE, WIDE, ask, chromium, number, picture, pixels, wait_for_text
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
def base_url(engine: ScriptedEngine) -> Iterator[str]:
    with serving(create_app(engine)) as url:
        yield url


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page that must not complain in its console."""
    complaints: list[str] = []
    contexts = []

    def opened(url: str, *, scheme: str = "light", viewport: dict[str, int] = WIDE, expect: str = "serving") -> Any:
        context = browser.new_context(color_scheme=scheme, viewport=viewport)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(url)
        page.wait_for_function("(text) => document.querySelector('#health span').textContent === text", arg=expect)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [text for text in complaints if "Failed to load resource" not in text] == []


def test_chat_streams_and_tells_its_times(base_url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(base_url)
    ask(page, "Does it <b>never</b> stop?")
    wait_for_text(page, ".assistant .facts", "stopped at max tokens")
    assert page.text_content(".user .body") == "Does it <b>never</b> stop?"
    assert page.text_content(".assistant .body").startswith("a batch that never stops")
    facts = page.text_content(".assistant .facts")
    assert "first token" in facts and "tokens/s" in facts and "60 tokens" in facts
    page.click("#new-chat")
    assert page.locator(".message").count() == 0 and page.locator("#welcome").is_visible()


def test_an_answer_can_be_stopped_and_its_request_leaves_the_engine(
    base_url: str, open_page: Callable[..., Any], engine: ScriptedEngine
) -> None:
    engine._step_s = 0.2
    page = open_page(base_url)
    ask(page, "Go on and on")
    wait_for_text(page, ".assistant .body", "a batch")
    page.click("#stop")
    wait_for_text(page, ".assistant .facts", "stopped by you")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    assert page.locator("#send").is_visible()


def test_refusals_are_shown_in_words(base_url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(base_url)
    ask(page, "please fail")
    wait_for_text(page, ".assistant .error", "The question is too hard.")
    ask(page, "and now?")
    wait_for_text(page, ".assistant:last-child .facts", "tokens/s")


def test_the_key_is_sent_and_asked_for(engine: ScriptedEngine, open_page: Callable[..., Any]) -> None:
    with serving(create_app(engine, api_key="sesame")) as url:
        page = open_page(url, expect="no connection")
        wait_for_text(page, "#advice", "asks for an API key")
        ask(page, "open")
        wait_for_text(page, ".error", "asks for an API key")
        page.click("#params summary")
        page.fill("#api-key", "wrong")
        page.press("#api-key", "Tab")
        wait_for_text(page, "#advice", "does not know this API key")
        page.fill("#api-key", "sesame")
        page.press("#api-key", "Tab")
        wait_for_text(page, "#health", "serving")
        ask(page, "open")
        wait_for_text(page, ".assistant:last-child .facts", "tokens/s")


def test_load_shows_in_the_batch_of_a_phone(base_url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(base_url, viewport=PHONE)
    assert page.locator("#batch").is_hidden()
    page.click("#tab-batch")
    assert "Idle" in page.text_content("#advice")
    page.wait_for_timeout(300)
    before = {name: pixels(page, name) for name in ("#lanes", "#blocks", "#c-requests")}
    page.click("#load")
    shown = "parseFloat(document.querySelector('{}').textContent)"
    for name, least in (("#n-running", 8), ("#n-kv", 1), ("#n-output", 1)):
        page.wait_for_function(f"() => {shown.format(name)} >= {least}")
    page.wait_for_timeout(1200)
    for name, old in before.items():
        assert pixels(page, name) != old, name
    picture(page, "load-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.wait_for_function("() => parseInt(document.querySelector('#load-status').textContent) >= 10")
    assert "failed" not in page.text_content("#load-status")


def test_cached_and_shared_blocks_are_shown_and_stay_when_all_is_quiet(
    base_url: str, open_page: Callable[..., Any], engine: ScriptedEngine
) -> None:
    page = open_page(base_url)
    assert page.text_content("#n-hits") == "–"
    page.wait_for_timeout(300)
    empty = pixels(page, "#blocks")
    page.click("#load")
    wait_for_text(page, "#blocks-text", "requests per block")
    wait_for_text(page, "#n-hits", "%")
    assert number(page, "#n-hits") > 0
    picture(page, "load-wide")
    page.click("#load-cancel")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    wait_for_text(page, "#blocks-text", "0 of 320 in use")
    assert "cached" in page.text_content("#blocks-text") and engine.stats.num_cached_blocks > 0
    page.wait_for_timeout(300)
    assert pixels(page, "#blocks") != empty
    later = open_page(base_url)
    wait_for_text(later, "#blocks-text", "cached")
    later.wait_for_timeout(300)
    assert pixels(later, "#blocks") != empty, "who comes later sees them too"


def test_load_can_be_cancelled(base_url: str, open_page: Callable[..., Any], engine: ScriptedEngine) -> None:
    engine._step_s = 0.05
    page = open_page(base_url)
    page.click("#load")
    page.wait_for_function("() => Number(document.querySelector('#n-running').textContent) >= 4")
    page.click("#load-cancel")
    wait_for_text(page, "#load-status", "cancelled")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")


def test_theme_follows_the_system_until_somebody_chooses(base_url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(base_url, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    light = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == light


def test_tabs_work_by_keyboard(base_url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(base_url, viewport=PHONE)
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-batch"
    assert page.locator("#batch").is_visible() and page.locator("#chat").is_hidden()


def test_nobody_looks_at_a_hidden_page(base_url: str, open_page: Callable[..., Any], engine: ScriptedEngine) -> None:
    page = open_page(base_url)
    assert len(engine.viewers) == 1
    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", { value: true, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    until = time.monotonic() + 5
    while engine.viewers and time.monotonic() < until:
        page.wait_for_timeout(50)
    assert engine.viewers == []


def test_the_page_finds_its_server_again(engine: ScriptedEngine, open_page: Callable[..., Any]) -> None:
    with serving(create_app(engine)) as url:
        page = open_page(url)
        page.route("**/live", lambda route: route.abort())
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        wait_for_text(page, "#advice", "The server cannot be reached.")
        page.unroute("**/live")
        wait_for_text(page, "#health", "serving")
