"""A headless browser for tests of the page. Needs Playwright and a Chromium; tests are skipped without them.

HEADWAY_SCREENSHOTS names a folder for pictures to look at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 360, "height": 740}
DRAWN_TEXT = """
    const draw = CanvasRenderingContext2D.prototype.fillText;
    window.drawn = new Map();
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
        window.drawn.set(text, { x, y });
        return draw.call(this, text, x, y, ...rest);
    };
"""
"""A script for a page: `drawn` has the text on its canvases, with the place where each was drawn last."""
NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """A browser without a window; arguments are its own."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", *arguments])
        yield browser
        browser.close()


def number(page: Any, selector: str) -> float:
    return float(page.text_content(selector).replace(",", "").rstrip("%") or 0)


def picture(page: Any, name: str) -> None:
    if folder := os.environ.get("HEADWAY_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def wait_for_text(page: Any, selector: str, text: str) -> None:
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)", arg=[selector, text]
    )


def pixels(page: Any, selector: str) -> str:
    return page.evaluate("(selector) => document.querySelector(selector).toDataURL()", selector)


def ask(page: Any, question: str) -> None:
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")


def wait_for_end(page: Any) -> None:
    """Of the answer."""
    page.locator("#send").wait_for(state="visible")


def answer_to(page: Any, question: str) -> None:
    ask(page, question)
    wait_for_end(page)


def reload(page: Any) -> None:
    page.reload()
    wait_for_text(page, "#health", "serving")


def wait_until(page: Any, condition: Callable[[], Any]) -> None:
    """Until something is so that is not on the page."""
    end_s = time.monotonic() + 25
    while not condition():
        assert time.monotonic() < end_s
        page.wait_for_timeout(50)


def num_unnamed(page: Any) -> int:
    """How many controls have no name for those who do not see them."""
    return page.evaluate("""() => [...document.querySelectorAll("button, input, textarea")].filter((control) =>
        !control.textContent.trim() && !control.ariaLabel && !control.labels?.length).length""")
