"""Heat maps: each cell has its number on the colour of its band, and nothing leaves the picture."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict

import pytest

from headway_lab.charts import HeatGrid, HeatMap, heat_map
from headway_lab.charts.svg import text_width
from tests.lab.charts.test_charts import SVG, hovers, parsed, texts


def grid(values: list[list[float]], title: str = "throughput") -> HeatGrid:
    columns, rows = [f"c{n}" for n in range(len(values[0]))], [f"r{n}" for n in range(len(values))]
    return HeatGrid(title, "batch (requests)", "spread (×)", columns, rows, values)


MAP = HeatMap([grid([[1.0, 2.96], [3.0, 21.7]]), grid([[-1.25, math.nan]], "another")], (1.5, 3.0, 20.0), "×")


def cells(svg: str) -> dict[str, ElementTree.Element]:
    """The rectangle of each cell, by what it says when the mouse rests on it."""
    found = {}
    for group in parsed(svg).iter(f"{SVG}g"):
        name, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert name is not None and name.text is not None
        if box is not None:
            found[name.text] = box
    return found


def test_a_heat_map_says_what_it_shows() -> None:
    svg = heat_map("the gain", y="times <static>", heat=MAP)
    shown = texts(svg)
    for text in ("the gain", "times <static>", "throughput", "another", "→ batch (requests)", "↓ spread (×)"):
        assert text in shown
    assert {"1.0×", "3.0×", "22×", "−1.2×", "–"} <= set(shown)
    assert {"under 1.5×", "1.5× to 3×", "3× to 20×", "20× and more"} <= set(shown)
    assert "throughput\nspread (×): r1\nbatch (requests): c1\n21.7×" in hovers(svg)
    assert "another\nspread (×): r0\nbatch (requests): c1\nno data" in hovers(svg)
    assert "prefers-color-scheme:dark" in svg


def test_a_bound_belongs_to_the_band_above_it() -> None:
    boxes = cells(heat_map("t", y="y", heat=MAP))
    looks = {name.split("\n")[-1]: (box.get("fill"), box.get("fill-opacity")) for name, box in boxes.items()}
    assert len(boxes) == 5 and len(set(looks.values())) == 4
    assert looks["3×"] != looks["2.96×"], "although both are written as 3.0×"
    assert looks["1×"] == looks["−1.25×"]


def test_no_text_and_no_cell_leaves_the_picture() -> None:
    long = "a title that is far longer than a narrow picture is wide, so that it has to go on in the next line"
    many = HeatMap([grid([[1.0] * 7], long)], (2.0,), "×")
    root = parsed(heat_map(long, y=long, heat=many))
    width, height = map(float, root.get("viewBox", "").split()[2:])
    for text in root.iter(f"{SVG}text"):
        x, size = float(text.get("x", "0")), text_width(text.text or "")
        start = {"middle": x - size / 2, "end": x - size}.get(text.get("text-anchor", ""), x)
        assert start >= 0 and start + size <= width + 1 and float(text.get("y", "0")) < height, text.text
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", "0")) + float(box.get("width", "0")) <= width


def test_a_heat_map_comes_back_from_json() -> None:
    document = json.loads(json.dumps(asdict(MAP)).replace("NaN", "null"))
    again = HeatMap.from_json(document)
    assert heat_map("t", y="y", heat=again) == heat_map("t", y="y", heat=MAP)


@pytest.mark.parametrize(
    ("values", "bounds"),
    [([[1.0]], ()), ([[1.0]], (2.0, 1.0)), ([[1.0]], (1.0, 2.0, 3.0, 4.0, 5.0)), ([[1.0], [1.0, 2.0]], (1.0,))],
)
def test_a_map_that_cannot_be_drawn_is_refused(values: list[list[float]], bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="heat map|bounds|rows and columns"):
        HeatMap([grid(values)], bounds)
