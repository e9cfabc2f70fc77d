"""Pages stand for themselves; plots of characters keep to their width."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from headway_lab.charts import Origin, Page, Series, command_text, line_chart, terminal_histogram, terminal_plot


def test_a_page_is_whole_and_takes_nothing_for_markup(tmp_path: Path) -> None:
    page = Page("Title <1>", "sub & title")
    page.heading("<h>")
    page.text("one <b>\n\ntwo")
    page.facts({"requests": 2_000, "nothing": None})
    page.table(["name", "value"], [["<a>", 1234.5], ["b", None]])
    page.code("headway bench <serve>")
    page.chart(line_chart("chart", x="x", y="y", series=[Series("s", [1, 2], [1, 2])]), "a <caption>")
    page.made_by(Origin("headway sim --set 'a=<b>'", "1.2.3", "7", "a machine & more"))
    page.save(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert html == page.render()
    body = html[html.index("<body>") : html.index("</html>")]
    root = ElementTree.fromstring(body)  # every element is closed
    shown = " ".join(root.itertext())
    for text in ("Title <1>", "sub & title", "<h>", "one <b>", "<a>", "1,234", "–", "2,000", "a <caption>", "<serve>"):
        assert text in shown
    foot = " ".join(root.find("footer").itertext())  # type: ignore[union-attr]
    for text in ("headway sim --set 'a=<b>'", "Headway 1.2.3", "seed: 7", "machine: a machine & more"):
        assert text in foot
    assert "<script" not in html and "src=" not in html and "@import" not in html
    assert len(root.findall("p")) == 3  # the subtitle and two paragraphs


def test_a_command_is_shown_without_its_secrets() -> None:
    given = ["headway", "bench", "serve", "--api-key", "hush", "--base-url", "http://me:pass@host:1/x", "--html", "a b"]
    shown = command_text(given)
    assert shown == "headway bench serve --api-key HIDDEN --base-url http://HIDDEN@host:1/x --html 'a b'"
    assert command_text(["x", "--api-key=hush"]) == "x --api-key=HIDDEN"


@pytest.mark.parametrize("width", [30, 72, 120])
def test_a_terminal_plot_keeps_to_its_width(width: int) -> None:
    xs = [float(number) for number in range(200)]
    plot = terminal_plot(xs, [math.sin(x / 20) for x in xs], width=width, height=8, x="time (s)", y="rate")
    lines = plot.splitlines()
    assert lines[0] == "rate" and lines[-1].endswith("time (s)")
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 8 + 4
    assert any("⠀" < character <= "⣿" for character in plot)


def test_a_terminal_plot_rises_where_its_values_rise() -> None:
    lines = terminal_plot([0, 1], [0, 10], width=40, height=5).splitlines()
    columns = [next(i for i, c in enumerate(line) if "⠀" < c <= "⣿") for line in lines[:5]]
    assert columns == sorted(columns, reverse=True)


def test_a_terminal_histogram_counts() -> None:
    lines = terminal_histogram([1, 1, 1, 2, 4], width=40, label="tokens").splitlines()
    assert lines[0] == "tokens"
    assert [line.split()[-1] for line in lines[1:]] == ["3", "1", "0", "1"]
    assert all(len(line) <= 40 for line in lines)
    log = terminal_histogram([1, 15, 150, 1500], width=60, log=True).splitlines()
    assert sum(int(line.split()[-1]) for line in log) == 4


def test_nothing_to_plot() -> None:
    assert terminal_plot([], [], y="rate") == "rate: no data"
    assert terminal_histogram([math.nan]) == "no data"
    assert "512 │" in terminal_histogram([512] * 3)
