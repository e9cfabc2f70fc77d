"""The page against a real server with the embedded model: chat, load, and a batch that changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.server_process import running_server
from tests.unit.server.browser import DRAWN_TEXT, PHONE, WIDE, ask, chromium, number, picture, pixels, wait_for_text

PATIENCE_MS = 120_000
CANVASES = ("#lanes", "#blocks", "#c-throughput", "#c-requests", "#c-ttft", "#c-itl")


@dataclass
class Visit:
    """A page, and what it did besides being looked at."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.add_init_script(DRAWN_TEXT)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.requested.append(request.url))


@pytest.fixture(scope="module")
def visit() -> Iterator[Visit]:
    """With a key, which the browser sends as a password of the page."""
    with chromium() as browser, running_server("--api-key", "sesame") as server:
        credentials = {"username": "anybody", "password": "sesame"}
        made = Visit(browser.new_page(viewport=WIDE, color_scheme="dark", http_credentials=credentials), server.url)
        made.page.goto(server.url)
        wait_for_text(made.page, "#health", "serving")
        yield made


def test_the_model_answers_and_the_answer_has_its_times(visit: Visit) -> None:
    page = visit.page
    wait_for_text(page, "#model", "SmolLM2-135M-Instruct")
    assert "continuous batching" in page.text_content("#how") and page.locator("#how").is_visible()
    page.click("#params summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "40")
    page.click("#params summary")
    ask(page, "What is the capital of France?")
    page.locator("#send").wait_for(state="visible")
    assert "Paris" in page.text_content(".assistant .body")
    assert "tokens/s" in page.text_content(".assistant .facts")
    assert page.locator("#how").is_hidden()


def test_an_answer_matches_the_schema_and_a_tool_is_called(visit: Visit) -> None:
    page = visit.page
    page.click("#format-toggle")
    page.locator("#format input[value=schema]").check()
    age = {"type": "integer", "minimum": 1, "maximum": 99}
    schema = {"type": "object", "properties": {"age": age}, "required": ["age"], "additionalProperties": False}
    page.fill("#schema", json.dumps(schema))
    ask(page, "Invent a person.")
    page.locator("#send").wait_for(state="visible")
    assert "parsed" in page.text_content(".assistant:last-of-type .mark")
    assert '"age": ' in page.text_content(".assistant:last-of-type .json code")
    page.locator("#format input[value=text]").check()
    page.check("#with-tools")
    page.check("#must-call")
    ask(page, "What is the weather in Rome?")
    page.locator("#send").wait_for(state="visible")
    assert page.text_content(".assistant:last-of-type .call b") == "get_weather"
    assert "city" in page.text_content(".assistant:last-of-type .call code")
    picture(page, "call-with-model")
    for box in page.locator(".results:visible textarea").all():
        box.fill("21 °C and sunny")
    page.click(".results:visible button")
    wait_for_text(page, ".assistant:last-of-type .facts", "tokens")
    page.locator("#send").wait_for(state="visible")
    page.uncheck("#with-tools")
    page.click("#format-toggle")


def test_load_runs_beside_a_chat_that_can_be_stopped(visit: Visit) -> None:
    page = visit.page
    page.wait_for_timeout(1100)  # the first point of the charts
    before = {name: pixels(page, name) for name in CANVASES}
    page.click("#load")
    page.wait_for_function("() => Number(document.querySelector('#n-running').textContent) >= 8")
    page.click("#params summary")
    page.fill("#max-tokens", "2000")
    page.click("#params summary")
    ask(page, "Write a very long story about a bus that never stops.")
    page.wait_for_function("() => document.querySelector('.assistant:last-of-type .body').textContent.length > 60")
    page.wait_for_function("() => window.drawn.get('you')?.y < 16")  # on top of all
    wait_for_text(page, "#lanes-text", "passed on while others kept running")
    assert number(page, "#n-output") > 0 and number(page, "#n-kv") > 0
    picture(page, "load-with-model")
    page.click("#stop")
    wait_for_text(page, ".assistant:last-of-type .facts", "stopped by you")
    for name, old in before.items():
        assert pixels(page, name) != old, name


def test_a_phone_in_daylight_shows_it_without_scrolling_sideways(visit: Visit) -> None:
    page = visit.page
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="light")
    for tab in ("batch", "chat"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(200)
        picture(page, f"phone-{tab}-with-model")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab
    page.click("#tab-batch")
    page.click("#load-cancel")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    wait_for_text(page, "#advice", "Idle")


def test_the_page_asked_nobody_else_and_did_not_complain(visit: Visit) -> None:
    assert [url for url in visit.requested if not url.startswith(f"{visit.url}/")] == []
    assert visit.complaints == []
