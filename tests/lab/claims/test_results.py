"""Rows that are kept, merged, and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway_lab.claims.claim_results import HEADERS, JSON_NAME, Results, as_markdown, as_page
from headway_lab.claims.scenarios import CLAIMS, find_claims
from tests.lab.claims.small import row


def saved(results: Results, folder: Path) -> Results:
    (folder / JSON_NAME).write_text(json.dumps(results.as_json()))
    return Results.load(folder)


def test_measuring_again_replaces_that_row_only(tmp_path: Path) -> None:
    results = Results()
    for one in (row("orca", ours="old"), row("eras", ours="old"), row("eras", ours="simulated", where="simulator")):
        results.put(one)
    again = saved(results, tmp_path)
    assert again.rows == results.rows
    again.put(row("eras", ours="new"))
    assert [(one.claim.id, one.outcome.ours) for one in again.rows] == [
        ("eras", "new"),
        ("eras", "simulated"),
        ("orca", "old"),
    ]
    document = Results({"x": row()}).as_json()
    document["rows"][0]["claim"]["id"] = "gone"
    (tmp_path / JSON_NAME).write_text(json.dumps(document))
    assert Results.load(tmp_path).rows == [], "a claim that is gone is left out"


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "headway claims", "format": 99}', '{"kind": "other"}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / JSON_NAME).write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        Results.load(tmp_path)


def test_the_table_has_a_line_for_each_row_and_says_where() -> None:
    results = Results(note="other work was on the machine")
    results.put(row())
    results.put(row("orca", where="simulator", trust="mean error of steps 3.0%"))
    text = as_markdown(results)
    assert "other work was on the machine" in text
    lines = [line for line in text.splitlines() if line.startswith(("| Static", "| Load"))]
    assert len(lines) == 2
    assert "[engine]" in lines[0] and "why \\| not" in lines[0]
    assert "[simulator; mean error of steps 3.0%]" in lines[1]
    assert all(line.replace("\\|", "").count("|") == len(HEADERS) + 1 for line in lines)
    assert "`headway claims orca --quick --on simulator`" in text


def test_what_was_measured_and_what_was_simulated_stand_in_one_row() -> None:
    results = Results()
    results.put(row("eras", ours="3×"))
    results.put(row("eras", ours="4×", where="simulator", trust="mean error of steps 3.0%"))
    html = as_page(results).render()
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    assert table.count("<tr>") == 1 and table.index("3×") < table.index("4×")
    assert html.count("<svg") == 2 and html.count("<h2>") == 1
    assert "machine: a machine" in html and "seed: fixed in each claim" in html
    lines = [line for line in as_markdown(results).splitlines() if line.startswith("| Static")]
    assert len(lines) == 1
    assert "3× [engine]; 4× [simulator; mean error of steps 3.0%]" in lines[0]
    assert "Engine: why \\| not Simulator: why \\| not" in lines[0]


def test_claims_are_found_by_name_in_the_order_of_the_table() -> None:
    assert [claim.id for claim in find_claims(["orca", "eras"])] == ["eras", "orca"]
    assert len(find_claims([])) == len(CLAIMS) == 19
    with pytest.raises(ConfigError, match="no claim 'preemption-tial'. Did you mean 'preemption-tail'?"):
        find_claims(["preemption-tial"])


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_a_claim_says_all_that_the_table_needs(claim: object) -> None:
    for name in ("title", "published", "source", "workload", "method"):
        assert getattr(claim, name).strip()
