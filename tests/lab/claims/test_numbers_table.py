"""The table of the thirty published numbers: its verdicts, the rows that it takes, and the documentation's copy."""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

from headway.cli.main import main
from headway_lab.claims.claim import Chart, Outcome
from headway_lab.claims.claim_results import JSON_NAME, Results, Row
from headway_lab.claims.numbers_table import HEADERS, ON_A_CPU, answers, best_rows, numbers_markdown
from headway_lab.claims.published_number import PublishedNumber, Question, Reading, Verdict
from headway_lab.claims.published_numbers import NUMBERS
from headway_lab.claims.scenarios import CLAIMS
from tests.lab.claims.small import row

DOCS = Path(__file__).parents[3] / "docs"


def docs_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("claims_table")


def outcome(value: float = 2.0, **numbers: dict[str, float]) -> Outcome:
    return Outcome(value, "×", "about twice", "work", "Since so. And more.", "engine", Chart("t", "y"), numbers)


def test_there_are_thirty_in_order_and_each_belongs_to_a_question() -> None:
    assert [one.number for one in NUMBERS] == list(range(1, 31))
    assert {one.question for one in NUMBERS} == set(Question)
    for one in NUMBERS:
        assert one.readings or one.command or Verdict.QUOTED in one.why, one.number
        assert one.published.strip() and one.source.strip()


def test_readings_name_rows_and_columns_that_their_claims_have() -> None:
    kept = best_rows([Results.load(file.parent) for file in (DOCS / "results").glob(f"*/{JSON_NAME}")])
    for number in NUMBERS:
        for reading in number.readings:
            rows = [one for one in kept if one.claim.id == reading.claim]
            if rows:
                assert any(reading.value(one.outcome) is not None for one in rows), (number.number, reading)


@pytest.mark.parametrize(
    ("reading", "value", "verdict"),
    [
        (Reading("eras", low=2, high=4), 3.0, Verdict.CONFIRMED),
        (Reading("eras", low=2, high=4), 4.4, Verdict.CONFIRMED),
        (Reading("eras", low=2, high=4), 4.5, Verdict.MORE),
        (Reading("eras", low=2, high=4), 1.8, Verdict.CONFIRMED),
        (Reading("eras", low=2, high=4), 1.7, Verdict.LESS),
        (Reading("eras", low=36.9), 100.0, Verdict.CONFIRMED),
        (Reading("eras", low=-90, high=-60, is_fall=True), -70.0, Verdict.CONFIRMED),
        (Reading("eras", low=-90, high=-60, is_fall=True), -99.9, Verdict.MORE),
        (Reading("eras", low=-90, high=-60, is_fall=True), -50.0, Verdict.LESS),
        (Reading("eras", high=4, is_fall=True), 8.0, Verdict.LESS),
        (Reading("eras"), 8.0, None),
    ],
)
def test_a_value_is_held_against_the_published_range_with_a_tenth_of_room(
    reading: Reading, value: float, verdict: Verdict | None
) -> None:
    assert reading.verdict(value) is verdict


@pytest.mark.parametrize(
    ("values", "is_fault", "verdict"),
    [
        ([2.0, 3.0], False, Verdict.CONFIRMED),
        ([2.0, 9.0], False, Verdict.MORE),
        ([2.0, 1.0], False, Verdict.PART),
        ([1.0, 1.0], False, Verdict.LESS),
        ([1.0, 1.0], True, Verdict.AVOIDED),
        ([], False, Verdict.OPEN),
    ],
)
def test_the_verdict_of_several_values(values: list[float], is_fault: bool, verdict: Verdict) -> None:
    reading = Reading("eras", low=2, high=4)
    number = PublishedNumber(1, Question.GAIN, "c", "p", "s", (reading, reading), is_fault=is_fault)
    assert number.verdict([(reading, value) for value in values]) is verdict
    assert dataclasses.replace(number, readings=()).verdict([]) is Verdict.QUOTED


def test_a_reading_takes_a_value_a_ratio_or_a_change() -> None:
    result = outcome(before={"ms": 40.0}, after={"ms": 30.0})
    assert Reading("eras").value(result) == 2.0
    assert Reading("eras").value(outcome(math.nan)) is None
    ratio, change = Reading("eras", "after", "ms", "before"), Reading("eras", "after", "ms", "before", unit="%")
    assert ratio.value(result) == pytest.approx(0.75) and change.value(result) == pytest.approx(-25)
    assert change.text(-25.0) == "−25%" and ratio.text(0.75) == "0.75×"
    assert Reading("eras", "after", "ms", label="after", unit="ms").text(30.0) == "after: 30 ms"
    assert Reading("eras", "gone", "ms").value(result) is None
    assert Reading("eras", "after", "ms", "gone").value(result) is None


def measured(name: str, place: str, *, is_gpu: bool, is_quick: bool = False, ours: str = "2×") -> Row:
    return dataclasses.replace(row(name, ours=ours, where=place), machine="M1", is_gpu=is_gpu, is_quick=is_quick)


def test_a_full_run_counts_before_a_quick_one_and_a_gpu_before_a_cpu() -> None:
    quick = measured("orca", "simulator", is_gpu=True, is_quick=True, ours="quick")
    full = measured("orca", "simulator", is_gpu=True, ours="full")
    slow = dataclasses.replace(measured("orca", "engine", is_gpu=False, ours="slow"), machine="two cores")
    rows = best_rows([Results({"x": quick, "y": slow}), Results({"x": full})])
    assert [one.outcome.ours for one in rows] == ["slow", "full"]
    orca = next(one for one in answers(rows) if one.published.number == 2)
    assert orca.texts(is_simulated=True) == ["full"] and orca.texts(is_simulated=False) == ["slow (two cores)"]
    assert orca.commands == [full.command], "the verdict rests on the GPU"
    assert orca.verdict is Verdict.LESS


def test_a_verdict_rests_on_rows_that_have_the_value_and_says_if_these_are_of_a_cpu() -> None:
    """The attention kernel is timed on an engine; the simulated row of the same claim has other numbers."""
    timed = measured("paging-cost", "engine", is_gpu=False, is_quick=True)
    numbers = {"blocks of 16": {"decode: scattered over contiguous": 1.01, "empty, %": 0.5}}
    timed = dataclasses.replace(timed, outcome=dataclasses.replace(timed.outcome, numbers=numbers))
    simulated = measured("paging-cost", "simulator", is_gpu=True)
    empty = {"blocks of 16": {"empty, %": 0.4}}
    simulated = dataclasses.replace(simulated, outcome=dataclasses.replace(simulated.outcome, numbers=empty))
    found = {one.published.number: one for one in answers([timed, simulated])}
    assert found[11].verdict is Verdict.AVOIDED and found[11].commands == [timed.command]
    assert ON_A_CPU in found[11].why and ON_A_CPU not in found[12].why
    assert found[12].commands == [simulated.command], "what is simulated of a GPU counts before a CPU"
    on_gpu = dataclasses.replace(timed, is_gpu=True)
    assert ON_A_CPU not in next(one for one in answers([on_gpu]) if one.published.number == 11).why


def test_a_number_without_results_or_without_a_claim_is_open() -> None:
    found = answers([])
    assert {one.verdict for one in found} == {Verdict.OPEN, Verdict.QUOTED}
    for one in found:
        assert one.commands == [f"headway claims {name}" for name in one.published.claims if name in CLAIMS]
    lines = numbers_markdown([]).splitlines()
    assert len(lines) == 32
    assert all(line.count("|") == len(HEADERS) + 1 for line in lines)


def test_the_documentation_has_the_table_as_the_kept_results_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = docs_script(monkeypatch)
    assert script.PART.is_current(script.table()), "run 'make docs'"


def test_the_command_prints_the_table_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(DOCS / "results" / "cpu-quick")
    page = tmp_path / "page.html"
    assert main(["claims", "--table", folder, "--html", str(page)]) == 0
    assert capsys.readouterr().out.count("\n") == 32
    html = page.read_text(encoding="utf-8")
    assert html.count('id="number-') == 30 and html.count("<article") >= 30
    assert all(one.value.replace("?", "") in html for one in Question)
    for wrong, told in (
        (["--html", "x.html"], "--html goes with --table"),
        (["--table", folder, "eras"], "--table measures nothing"),
        (["--table", str(tmp_path)], "no results"),
    ):
        assert main(["claims", *wrong]) == 2
        assert told in capsys.readouterr().err
