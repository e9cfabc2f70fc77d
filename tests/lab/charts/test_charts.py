"""Charts are well-formed SVG that says what it shows, whatever the data."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from headway_lab.charts import Series, bar_chart, cdf_chart, histogram_chart, line_chart
from headway_lab.charts.line_chart import Box, LabelPlacer, Spot, thin_cloud, thin_line
from headway_lab.charts.scale import bin_edges, counts_between

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}text")]


def hovers(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}title")]


def paths(svg: str) -> list[str]:
    return [element.get("d") or "" for element in parsed(svg).iter(f"{SVG}path")]


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d", path)]


def test_a_line_chart_says_what_it_shows() -> None:
    svg = line_chart(
        "P99 <latency> & rate",
        x="rate (requests/s)",
        y="P99 ITL (ms)",
        series=[Series("fcfs", [1, 2, 3], [10, 20, 40]), Series("srpt", [1, 2, 3], [9, 12, 20])],
        lines={"SLO": 30.0},
        x_lines={"capacity": 2.5},
    )
    shown = texts(svg)
    for label in ("P99 <latency> & rate", "rate (requests/s)", "P99 ITL (ms)", "fcfs", "srpt", "SLO", "capacity"):
        assert label in shown
    assert "fcfs\nrate (requests/s): 2\nP99 ITL (ms): 20" in hovers(svg)
    assert "SLO: 30" in hovers(svg)
    assert "prefers-color-scheme:dark" in svg


def test_one_series_has_no_legend_and_many_have_rows_of_it() -> None:
    assert "alone" not in texts(line_chart("t", x="x", y="y", series=[Series("alone", [1], [1])]))
    many = [Series(f"series number {number}", [0, 1], [number, 1]) for number in range(9)]
    svg = line_chart("t", x="x", y="y", series=many)
    assert sum(text.startswith("series number") for text in texts(svg)) == 9
    assert 'stroke-dasharray="6 4"' in svg  # colours come again, dashed
    series = [Series("served", [1, 2], [1, 1.5]), Series("offered = served", [1, 2], [1, 2], is_reference=True)]
    svg = line_chart("t", x="x", y="y", series=series)
    assert "offered = served" in texts(svg)
    assert [path.get("stroke") for path in parsed(svg).iter(f"{SVG}path")] == ["var(--hw-1)", "var(--hw-dim)"]


@pytest.mark.parametrize("kind", ["line", "step", "points"])
@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_without_anything_to_draw(kind: str, values: list[float]) -> None:
    series = [Series("a", values, values, kind=kind)]  # type: ignore[arg-type]
    assert "no data" in texts(line_chart("t", x="x", y="y", series=series))
    assert "no data" in texts(line_chart("t", x="x", y="y", series=[], lines={"SLO": 1.0}))
    assert "no data" in texts(cdf_chart("t", x="x", samples={"a": values}))
    assert "no data" in texts(histogram_chart("t", x="x", samples={"a": values}))
    assert "no data" in texts(bar_chart("t", y="y", bars={str(v): v for v in values}))


NEARLY_100 = [100.0, 100.00000000000001, 99.99999999999999]


@pytest.mark.parametrize("values", [*([one] * 3 for one in (0.0, 7.0, -3.0, 1e-9, 1e12)), NEARLY_100], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_one_value_only(values: list[float], log: bool) -> None:
    """Or several that differ by rounding errors."""
    for ys in (values, [1e-3 * value for value in values]):
        parsed(line_chart("t", x="x", y="y", series=[Series("a", values, ys)], log_x=log, log_y=log))
        parsed(cdf_chart("t", x="x", samples={"a": ys}, log_x=log))
        parsed(histogram_chart("t", x="x", samples={"a": ys}, log_x=log))
        parsed(bar_chart("t", y="y", bars={"a": ys[0], "b": ys[1]}, log_y=log))


def test_what_has_no_place_leaves_a_gap() -> None:
    svg = line_chart("t", x="x", y="y", series=[Series("a", [1, 2, 3, 4, 5], [1, 2, math.nan, 4, 5])])
    assert paths(svg)[0].count("M") == 2
    svg = line_chart("t", x="x", y="y", series=[Series("a", [0, 1, 2], [1, 2, 3])], log_x=True)
    assert paths(svg)[0].count("L") == 1
    svg = cdf_chart("t", x="ms", samples={"a": [0.0, 0.0, 1.0, 10.0]})
    assert "a\nms: 1\nshare of values at or below (%): 75" in hovers(svg)


def test_thousands_of_points_are_thinned_and_peaks_stay() -> None:
    xs = [0.01 * number for number in range(50_000)]
    ys = [100.0 if number == 31_415 else 1.0 for number in range(50_000)]
    svg = line_chart("t", x="x", y="y", series=[Series("a", xs, ys)])
    assert len(svg) < 80_000
    assert min(numbers(paths(svg)[0])[1::2]) < 100  # the peak reaches the top
    cloud = line_chart("t", x="x", y="y", series=[Series("a", xs, [random.random() for _ in xs], kind="points")])
    assert cloud.count("<circle") < 6_000
    ys = [3.0] * 900
    ys[200], ys[700] = 9.0, -9.0
    spots = [Spot(0.001 * n, y, n) for n, y in enumerate(ys)]
    assert [spot.number for spot in thin_line(spots)] == [0, 200, 700, 899], "ends and extremes stay"
    assert thin_cloud(spots) == spots


def test_labels_stand_beside_points_and_never_on_each_other() -> None:
    placer = LabelPlacer(Box(0, 0, 400, 200))
    drawn = [placer.label("a label", 100, 100) for _ in range(10)]
    assert sum(bool(label) for label in drawn) == 4
    svg = line_chart("t", x="x", y="y", series=[Series("a", [1, 2], [1, 2], kind="points", labels=["first", "second"])])
    assert {"first", "second"} <= set(texts(svg))
    assert any("first" in hover for hover in hovers(svg))


def test_a_cdf_reaches_every_share_at_the_right_place() -> None:
    svg = cdf_chart("t", x="ms", samples={"a": [float(v) for v in range(1, 101)]}, log_x=False)
    assert "a\nms: 100\nshare of values at or below (%): 100" in hovers(svg)
    for hover in hovers(svg):
        found = re.fullmatch(r"a\nms: (\d+)\nshare of values at or below \(%\): (\d+)", hover)
        assert found is None or found[1] == found[2]
    assert {"P50", "P90", "P99"} <= set(texts(svg))


def test_histogram_counts() -> None:
    svg = histogram_chart("t", x="tokens", samples={"a": [1, 1, 2, 3, 3, 3]})
    assert "a\n3 to 4: 3 (50.0%)" in hovers(svg)
    assert "a\n1 to 2: 2 (33.3%)" in hovers(svg)


@pytest.mark.parametrize("is_log", [False, True])
def test_every_value_falls_into_a_bin(is_log: bool) -> None:
    rng = random.Random(0)
    for most in (5, 12, 40):
        values = [rng.lognormvariate(3, 2) for _ in range(500)]
        edges = bin_edges(values, is_log=is_log, most=most)
        assert sum(counts_between(values, edges)) == 500
        assert edges == sorted(set(edges))
        assert most // 3 <= len(edges) - 1 <= most + 2


def test_bars() -> None:
    svg = bar_chart("t", y="times (×)", bars={"paging": 2.5, "none": math.nan, "less": -1.0}, notes={"paging": "2–4×"})
    shown = texts(svg)
    assert {"paging", "2.5", "2–4×", "no data", "−1", "times (×)"} <= set(shown)
    assert "paging: 2.5\n2–4×" in hovers(svg)
    widths = [float(rect.get("width") or 0) for rect in parsed(svg).iter(f"{SVG}rect")]
    assert widths[0] == pytest.approx(2.5 * widths[1], rel=0.01)


def test_equal_lines_are_dashed_over_each_other_and_named_as_the_same() -> None:
    series = [Series(name, [1, 2, 3], ys) for name, ys in (("a", [5, 6, 7]), ("b", [5, 6, 8]), ("c", [5, 6, 7]))]
    svg = line_chart("t", x="x", y="y", series=series)
    assert [text for text in texts(svg) if text[0] in "abc"] == ["a", "b", "c (same as a)"]
    patterns = [path.get("stroke-dasharray") for path in parsed(svg).iter(f"{SVG}path")]
    assert patterns[:2] == ["none", "none"] and patterns[2] != "none"
    assert "same as" not in "".join(texts(line_chart("t", x="x", y="y", series=series[:2])))
    same = cdf_chart("t", x="x", samples={name: [1.0, 2.0, 3.0] for name in "abc"})
    assert {"b (same as a)", "c (same as a)"} <= set(texts(same))
    patterns = [path.get("stroke-dasharray") for path in parsed(same).iter(f"{SVG}path")]
    assert len(set(patterns)) == 3  # all three can be seen


def test_bars_of_ratios_begin_at_one() -> None:
    svg = bar_chart("t", y="ratio", bars={"half": 0.5, "twice": 2.0}, log_y=True, base=1.0)
    left, right = (rect for rect in parsed(svg).iter(f"{SVG}rect"))
    end = float(left.get("x") or 0) + float(left.get("width") or 0)
    assert end == pytest.approx(float(right.get("x") or 0), abs=0.1)
    assert left.get("width") == right.get("width")
