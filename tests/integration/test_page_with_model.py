"""The page against a real server with the embedded model: chat, load, and a batch that changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.server_process import running_server
from tests.unit.server.browser import DRAWN_TEXT, WIDE, ask, chromium, number, picture, pixels, wait_for_text

PATIENCE_MS = 120_000
CANVASES = ("#lanes", "#blocks", "#c-throughput", "#c-requests", "#c-ttft", "#c-itl")


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """With a key, which the browser sends as a password of the page. It asks nobody else, and does not complain."""
    complaints, requested = [], []
    with chromium() as browser, running_server("--api-key", "sesame") as server:
        credentials = {"username": "anybody", "password": "sesame"}
        made = browser.new_page(viewport=WIDE, color_scheme="dark", http_credentials=credentials)
        made.set_default_timeout(PATIENCE_MS)
        made.add_init_script(DRAWN_TEXT)
        made.on("pageerror", lambda error: complaints.append(str(error)))
        made.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        made.on("request", lambda request: requested.append(request.url))
        made.goto(server.url)
        wait_for_text(made, "#health", "serving")
        yield made
        assert [url for url in requested if not url.startswith(f"{server.url}/")] == []
        assert complaints == []


def test_the_model_answers_and_the_answer_has_its_times(page: Any) -> None:
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


def test_load_runs_beside_a_chat_that_can_be_stopped(page: Any) -> None:
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
    page.click("#load-cancel")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    wait_for_text(page, "#advice", "Idle")
