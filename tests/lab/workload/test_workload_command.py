"""`headway workload`: numbers, plots, JSON and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli import main

ORCA = "orca"


def test_numbers_and_plots(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["workload", ORCA, "--requests", "300"]) == 0
    out = capsys.readouterr().out
    for text in ("orca: in U(32, 512)", "requests  300", "gap CV", "P99", "arrivals (requests/s)", "output tokens"):
        assert text in out


def test_json_is_only_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ["--requests", "200", "--rate", "8", "--set", "limits.max_input=100", "--json", "--html", str(page)]
    assert main.main(["workload", ORCA, *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_requests"] == 200 and told["input"]["max"] == 100
    assert told["rate"] == pytest.approx(8, rel=0.2)
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 3
    for text in ("Arrivals over time", "Lengths of prompts and answers", "time (s)", "requests/s"):
        assert text in html


def test_all_at_once_has_no_plot_of_arrivals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main.main(["workload", ORCA, "--rate", "inf", "--requests", "50", "--html", str(page)]) == 0
    assert "all at once" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").count("<svg") == 1


def test_texts_take_the_embedded_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    file = tmp_path / "load.toml"
    file.write_text('output = 4\n[content]\nkind = "prompts"\nfile = "prompts.jsonl"\n')
    assert main.main(["workload", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["input"]["max"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.toml"], "workload 'none.toml': the file cannot be read"),
        ([ORCA, "--rate", "1e-308"], "The last request would come inf s after the first"),
        ([ORCA, "--requests", "10000001"], "A workload has at most 10,000,000 requests"),
        ([ORCA, "--set", "limits.max_inpt=3"], "Did you mean 'max_input'?"),
        ([ORCA, "--set", "nothing"], "is not KEY=VALUE"),
        ([ORCA, "--html", "/nowhere/page.html"], "Cannot write '/nowhere/page.html'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["workload", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
