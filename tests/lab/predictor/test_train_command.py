"""`headway train-predictor`, from a log to a file that predicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.cli import main
from headway.predict import LearnedRanker, TrafficLog
from tests.unit.predict.traffic import make_traffic

pytest.importorskip("lightgbm")


def write_log(path: Path, count: int) -> Path:
    with TrafficLog(path) as log:
        for sample in make_traffic(count):
            log.write(sample.prompt, num_output_tokens=sample.num_output_tokens, finish_reason=sample.finish_reason)
    return path


def test_trains_reports_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, output = write_log(tmp_path / "log", 300), tmp_path / "model"
    with log.open("a") as file:
        file.write("nonsense\n")
    assert main.main(["train-predictor", str(log), "-o", str(output), "--held-out", "0.3", "--seed", "4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "301 rows: 300 used (0 of them cut at max_tokens), 0 aborted or failed, 1 skipped as unreadable" in out
    tau = {
        name: float(re.search(rf"\| {name} \| (-?[\d.]+) \|", out)[1]) for name in ("prompt length", "learned ranker")
    }  # type: ignore[index]
    assert tau["learned ranker"] > 0.5 > tau["prompt length"]
    assert "regression 0." in out and "lambdarank 0." in out
    assert re.search(r"takes [\d.]+ ms for one request, and [\d.]+ ms per request for 64 at once", out)
    assert LearnedRanker.load(output).predict([make_traffic(1)[0].prompt])[0] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{log}", "-o", "{folder}/model", "--held-out", "1.5"], "--held-out must be between 0 and 1"),
        (["{log}", "-o", "{folder}/no/model"], "there is no folder"),
        (["{log}", "-o", "{folder}/model", "--max-requests", "0"], "--max-requests must be at least 1"),
        (["{folder}/nothing", "-o", "{folder}/model"], "Cannot read the traffic log"),
        (["{log}", "-o", "{folder}/model"], "too few"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    log = write_log(tmp_path / "log", 60)
    assert main.main(["train-predictor", *(text.format(log=log, folder=tmp_path) for text in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "model").exists()
