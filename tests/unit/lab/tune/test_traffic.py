"""Requests from a traffic log: lengths and times as logged; a log without times is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.lab.tune.tune_command import traffic_work
from headway.predict import PromptView
from headway.predict.traffic_log import TrafficLog


def write(path: Path, *rows: tuple[float | None, int, int, str]) -> None:
    """(arrival, tokens in, tokens out, how it ended)"""
    with TrafficLog(path) as log:
        for arrival_s, num_in, num_out, reason in rows:
            log.write(
                PromptView([1] * num_in, max_tokens=100, temperature=1.0, text=None, user=None),
                num_output_tokens=num_out,
                finish_reason=reason,
                arrival_s=arrival_s,
            )


def test_lengths_and_times(tmp_path: Path) -> None:
    write(tmp_path / "log", (1012.0, 7, 3, "stop"), (1010.0, 5, 9, "length"), (1011.0, 5, 1, "abort"))
    work = traffic_work([tmp_path / "log"], vocab_size=100)
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work] == [(0.0, 5, 9), (2.0, 7, 3)]
    assert work == traffic_work([tmp_path / "log"], vocab_size=100)


def test_a_log_without_times_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "log", (1012.0, 7, 3, "stop"), (None, 5, 9, "stop"))
    with pytest.raises(ConfigError, match="1 of 2 requests .* no time of arrival"):
        traffic_work([tmp_path / "log"], vocab_size=100)


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "log", (1.0, 7, 3, "abort"))
    with pytest.raises(ConfigError, match="no request"):
        traffic_work([tmp_path / "log"], vocab_size=100)
