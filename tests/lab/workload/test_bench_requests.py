"""The work is the same wherever it is drawn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway_lab.bench.offline_bench import SCENARIOS
from headway_lab.workload.bench_requests import LengthRange, TraceLimits, draw_work, trace_work


def test_work_is_drawn_as_the_other_engines_draw_it() -> None:
    """Fixed lengths draw nothing but ids."""
    for name, num_requests, num_in, num_out in (("b1", 1, 128, 256), ("b64", 64, 128, 256), ("prefill", 128, 2048, 1)):
        random.seed(0)
        work = SCENARIOS[name].draw(0, 151_936)
        drawn = [[random.randint(0, 10000) for _ in range(num_in)] for _ in range(num_requests)]
        assert [request.prompt_token_ids for request in work] == drawn
        assert {request.num_output_tokens for request in work} == {num_out}
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    work = SCENARIOS["nano"].draw(0, 151_936)
    assert [request.prompt_token_ids for request in work] == prompts
    assert [request.num_output_tokens for request in work] == outputs
    assert (sum(map(len, prompts)), sum(outputs)) == (142_827, 133_966)


def test_lengths_around_a_length() -> None:
    assert LengthRange.around(100, 0.0) == LengthRange(100, 100)
    assert LengthRange.around(100, 0.25) == LengthRange(75, 125)
    assert LengthRange.around(1, 0.9) == LengthRange(1, 1)
    work = draw_work(
        random.Random(1), 200, input_len=LengthRange(3, 5), output_len=LengthRange(7, 8), vocab_size=50, num_choices=2
    )
    assert {request.num_prompt_tokens for request in work} == {3, 4, 5}
    assert {request.num_output_tokens for request in work} == {7, 8}
    assert {request.num_choices for request in work} == {2}


def test_a_trace_is_clamped_and_sped_up(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,3,1\n5.0,9000,50\n7.5,4,5000\n9,1,1\n")
    work = trace_work(str(trace), random.Random(0), vocab_size=50, limits=TraceLimits(num_requests=3))
    assert [request.arrival_s for request in work] == [0.0, 2.0, 3.0]
    assert [request.num_prompt_tokens for request in work] == [3, 7000, 4]
    assert [request.num_output_tokens for request in work] == [2, 50, 1000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,input_tokens\n1,2\n", "lacks times of arrival, input tokens or output tokens"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n1e12,1,1\n", "31 years"),
        ("arrival_s,input_tokens,output_tokens\n0,1,x\n", "line 2"),
        (None, "Cannot read the trace"),
    ],
)
def test_a_bad_trace_is_refused_with_the_reason(tmp_path: Path, text: str | None, message: str) -> None:
    trace = tmp_path / "trace.csv"
    if text is not None:
        trace.write_text(text)
    with pytest.raises(ConfigError, match=message):
        trace_work(str(trace), random.Random(0), vocab_size=50, limits=TraceLimits())
