"""The log: what goes in comes out, what is private stays out, and damage costs only the lines it hit."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.predict import PromptView, TrafficLog, TrafficLogError, read_traffic, traffic_log
from headway.predict.features import prompt_features

PROMPT = PromptView(
    [11, 12, 13, 14], max_tokens=64, temperature=0.5, text="Tell me a secret of Zanzibar.", user="ann@example.org"
)


def write_one(path: Path, content: str = "hashed", **changes: Any) -> dict[str, Any]:
    """Log one request; the line as it stands in the file."""
    options = {"num_output_tokens": 20, "finish_reason": "stop", "arrival_s": 12.5} | changes
    with TrafficLog(path, content) as log:
        log.write(PROMPT, **options)
    line: dict[str, Any] = json.loads(path.read_bytes().splitlines()[-1])
    return line


@pytest.mark.parametrize("content", ["hashed", "ids"])
def test_round_trip(tmp_path: Path, content: str) -> None:
    write_one(tmp_path / "log", content)
    read = read_traffic([tmp_path / "log"])
    (record,) = read.records
    assert record.features == prompt_features(PROMPT)
    assert (record.num_output_tokens, record.is_cut, record.arrival_s) == (20, False, 12.5)
    assert (read.num_lines, read.num_bad, read.num_ended_early) == (1, 0, 0)


def test_hashed_holds_neither_text_nor_tokens_nor_user(tmp_path: Path) -> None:
    line = write_one(tmp_path / "log")
    assert line.keys().isdisjoint({"text", "prompt_token_ids"})
    text = (tmp_path / "log").read_text()
    assert "Zanzibar" not in text and "ann" not in text.replace("cannot", "") and "[11,12" not in text
    assert stat.S_IMODE(os.stat(tmp_path / "log").st_mode) == 0o600


def test_how_requests_ended(tmp_path: Path) -> None:
    for reason in ("stop", "length", "abort", "error"):
        write_one(tmp_path / "log", finish_reason=reason)
    read = read_traffic([tmp_path / "log"])
    assert [record.is_cut for record in read.records] == [False, True]
    assert (read.num_lines, read.num_ended_early, read.num_bad) == (4, 2, 0)


def test_bad_lines_are_counted_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = write_one(tmp_path / "log")
    changes: list[dict[str, Any]] = [
        *({"v": 2}, {"features": 99}, {"features": 1}, {"output_tokens": -1}, {"output_tokens": True}),
        *({"max_tokens": "many"}, {"grams": "AAAA"}, {"grams": 3}, {"heads": [1]}, {"heads": [1, 2, 3, 2**40]}),
        *({"cues": "x"}, {"turns": [1.0]}, {"temperature": float("nan")}),
        *({"finish_reason": "tired"}, {"finish_reason": ["stop"]}),
        *({"prompt_token_ids": ids} for ids in ([], [1, "x"], [1, -5])),
        {"prompt_token_ids": [1], "text": 7},
    ]
    bad = ["not json", "[1]", "{}", "\x00\x00", "[" * 100_000, *(json.dumps(good | change) for change in changes)]
    with (tmp_path / "log").open("ab") as file:
        file.write(b"\xff\xfe\n\n")
        file.write("".join(line + "\n" for line in bad).encode())
    write_one(tmp_path / "log")
    with caplog.at_level(logging.WARNING):
        read = read_traffic([tmp_path / "log"])
    assert len(read.records) == 2
    assert read.num_bad == len(bad) + 1
    assert len(caplog.records) == 1 and f"skipped {len(bad) + 1} bad lines (line 2: " in caplog.text


def test_a_cut_last_line_is_normal_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    write_one(path)
    with path.open("ab") as file:
        file.write(path.read_bytes()[:100])
    read = read_traffic([path])
    assert (len(read.records), read.num_bad) == (1, 0)
    write_one(path)
    read = read_traffic([path])
    assert (len(read.records), read.num_bad) == (2, 1)
    monkeypatch.setattr(traffic_log, "MOST_LINE_BYTES", 5000)
    with path.open("ab") as file:
        file.write(b"x" * 20_000 + b"\n")  # too long, and one bad line
    write_one(path)
    read = read_traffic([path])
    assert (len(read.records), read.num_bad) == (3, 2)


def test_of_many_the_last_are_kept(tmp_path: Path) -> None:
    for number in range(10):
        write_one(tmp_path / f"log{number // 5}", num_output_tokens=number)
    read = read_traffic([tmp_path / "log0", tmp_path / "log1"], most_records=3)
    assert [record.num_output_tokens for record in read.records] == [7, 8, 9]
    assert read.num_lines == 10


def test_a_log_that_cannot_be_written_does_not_stop_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    log = TrafficLog(tmp_path / "log")
    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        log.write(PROMPT, num_output_tokens=1, finish_reason="stop")
    assert caplog.text.count("No space left") == 1
    log.close()


def test_wrong_places_and_names(tmp_path: Path) -> None:
    with pytest.raises(TrafficLogError, match="Cannot write"):
        TrafficLog(tmp_path / "no" / "folder")
    with pytest.raises(TrafficLogError, match="Cannot read"):
        read_traffic([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="hashed, ids"):
        TrafficLog(tmp_path / "log", "plain")
