"""Spans, traces and what is summed up and drawn from them."""

from __future__ import annotations

import json
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import draw_trace

from headway import tracing
from headway.console.step_profiler import StepProfiler
from headway.console.step_trace import (
    kind_of,
    move_spans,
    parse_trace,
    read_trace,
    short_name,
    summarise,
    write_trace,
)
from headway.errors import ConfigError, HeadwayError
from headway.tracing import HostSpan, Recorder, record_into, span
from tests.unit.console.synthetic_trace import synthetic_trace


def moved_trace(num_steps: int = 5) -> dict[str, Any]:
    spans = [HostSpan("step", index, index + 1, 0, {"index": index}) for index in range(num_steps)]
    return move_spans(synthetic_trace(num_steps), spans)


def step_indices(raw: dict[str, Any]) -> list[int]:
    """The numbers that the steps of a trace carry."""
    steps = [event for event in raw["traceEvents"] if event.get("cat") == "headway" and event["name"] == "step"]
    return [event["args"]["index"] for event in steps]


def test_a_recorder_keeps_spans_and_annotates() -> None:
    assert span("schedule", size=3) is span("update"), "nobody records"
    recorder = Recorder()
    record_into(recorder)
    try:
        with span("outer", size=3), span("inner"):
            pass
        with pytest.raises(ValueError), span("failing"):
            raise ValueError
    finally:
        record_into(None)
    with span("too late"):
        pass
    inner, outer, failing = recorder.spans
    assert [inner.name, outer.name, failing.name] == ["inner", "outer", "failing"]
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert outer.args == {"size": 3}


def test_spans_move_to_a_track_of_their_own() -> None:
    events = moved_trace()["traceEvents"]
    own = [event for event in events if event.get("cat") == "headway"]
    assert len(own) == 5 * 5
    track = own[0]["pid"]
    assert all(event["pid"] != track for event in events if event.get("cat") in ("kernel", "cpu_op"))
    names = [
        event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["pid"] == track and "name" in event["args"]
    ]
    assert names == ["headway", "engine"]
    assert step_indices(moved_trace()) == [0, 1, 2, 3, 4]
    assert not any("annotation" in event.get("cat", "") for event in events)


def test_summary_of_a_gpu_trace_by_hand() -> None:
    summary = summarise(parse_trace(moved_trace(10)))
    assert (summary.num_steps, summary.step_us, summary.has_kernels) == (10, 1000.0, True)
    assert {share.name: share.us_per_step for share in summary.host} == {
        "wait": 840.0, "schedule": 60.0, "submit": 40.0, "update": 20.0,
    }  # fmt: skip
    assert [share.kind for share in summary.computing] == ["linear", "attention", "norm/rope/activation", "sampling"]
    assert summary.by_kind()["linear"] == 500.0
    assert (summary.busy_us, summary.idle_us, summary.busy_share) == (790.0, 210.0, pytest.approx(0.79))
    assert summary.longest_gap_us == 160.0
    assert summary.gaps_per_step == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "linear"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<…>>", "attention"),
        ("rope_write_kv_kernel", "norm/rope/activation"),
        ("rms_norm_kernel", "norm/rope/activation"),
        ("prefill_kernel", "attention"),
        ("_pick_from_parts_kernel", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
        ("aten::addmm", "linear"),
        ("something_else", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    long_name = "void at::native::vectorized_kernel<4, Functor<float> >(int)"
    assert short_name(long_name) == "vectorized_kernel" and len(short_name("x" * 99)) == 56


def profiled(num_calls: int, *, first_step: int, num_steps: int) -> StepProfiler:
    weight = torch.ones(8, 8)

    def step() -> list[Any]:
        with span("schedule", size=8):
            pass
        torch.nn.functional.linear(weight, weight)
        return []

    profiler = StepProfiler(step, first_step=first_step, num_steps=num_steps)
    for _ in range(num_calls):
        profiler.step()
    return profiler


def test_a_window_of_steps_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profiler = profiled(12, first_step=5, num_steps=4)
    assert tracing.span("x") is tracing.span("y")
    raw = profiler.finish()
    path = tmp_path / "trace.json"
    write_trace(str(path), raw)
    trace = read_trace(str(path))
    assert step_indices(raw) == [5, 6, 7, 8]
    assert [event.name for event in trace.operators] == ["aten::linear"] * 4
    for step, operator in zip(trace.steps, trace.operators):
        assert step.start_us < operator.start_us and operator.end_us < step.end_us
    summary = summarise(trace)
    assert [share.name for share in summary.host] == ["schedule"]
    assert not summary.has_kernels and 0 < summary.busy_share < 1
    assert "profiler_st" not in capfd.readouterr().err
    picture = tmp_path / "trace.svg"
    assert draw_trace.main([str(path), str(picture), "--first", "1", "--steps", "2"]) == 0
    assert "2 steps" in picture.read_text()
    xml.dom.minidom.parse(str(picture))


def test_a_run_that_ends_early() -> None:
    raw = profiled(4, first_step=2, num_steps=30).finish()
    assert len(parse_trace(raw).steps) == 2
    assert tracing.span("x") is tracing.span("y")
    for num_calls in (0, 1, 4):
        with pytest.raises(HeadwayError, match="There is no profile"):
            profiled(num_calls, first_step=5, num_steps=3).finish()


def test_an_error_in_a_step_ends_the_recording() -> None:
    def fail() -> list[Any]:
        raise ValueError("in the step")

    profiler = StepProfiler(fail, first_step=1, num_steps=3)
    with pytest.raises(ValueError, match="in the step"):
        profiler.step()
    assert tracing.span("x") is tracing.span("y")


def test_the_picture_shows_host_and_device() -> None:
    picture = draw_trace.draw(parse_trace(moved_trace()), first=1, num_steps=2)
    xml.dom.minidom.parseString(picture)
    assert "2 steps, 1,000 µs each" in picture
    assert picture.count("paged_decode_attention_kernel: 200.0 µs") == 2
    assert picture.count("<title>schedule") == 2
    assert draw_trace.KIND_COLOURS.keys() == set(draw_trace.KINDS)


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    assert draw_trace.main([str(tmp_path / "x.json"), str(tmp_path / "x.svg")]) == 1
    assert "not a trace" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Cannot read"):
        read_trace(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="Cannot write"):
        write_trace(str(tmp_path / "no folder" / "x.json"), {})
    with pytest.raises(HeadwayError, match="no step"):
        summarise(parse_trace({"traceEvents": []}))
