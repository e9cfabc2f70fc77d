"""Arrivals: rates, bursts, traces, and rates from outside."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway_lab.workload import Workload, statistics_of, workload_from_options

NUM_REQUESTS = 8_000
TRACE = "arrival_s,input_tokens,output_tokens\n100,1,1\n102,2,2\n103,3,3\n107,4,4\n"


def workload(arrivals: dict[str, Any], **more: Any) -> Workload:
    options = {"input": 1, "output": 1, "requests": NUM_REQUESTS, "arrivals": arrivals, **more}
    base = options.pop("base", None)
    return workload_from_options(options, base=base)


def times(found: Workload, **options: Any) -> list[float]:
    return [request.arrival_s for request in found.draw(vocab_size=10, **options)]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        ({"kind": "poisson", "rate": 5.0}, 1.0),
        ({"kind": "gamma", "rate": 5.0, "cv": 2.0}, 2.0),
        ({"kind": "gamma", "rate": 5.0, "cv": 0.5}, 0.5),
        ({"kind": "gamma", "rate": 5.0, "cv": 0}, 0.0),
    ],
)
def test_rate_and_variation(arrivals: dict[str, Any], cv: float) -> None:
    work = workload(arrivals).draw(vocab_size=10)
    found = statistics_of(work)
    assert found.rate == pytest.approx(5.0, rel=0.06)
    assert found.gap_cv == pytest.approx(cv, rel=0.06, abs=1e-6)
    arrived = [request.arrival_s for request in work]
    assert arrived[0] == 0.0 and arrived == sorted(arrived)


def test_a_rate_from_outside_stretches_the_same_pattern() -> None:
    poisson = workload({"kind": "poisson", "rate": 5.0}, requests=100)
    slow, fast = times(poisson, rate=1.0), times(poisson, rate=10.0)
    assert slow == pytest.approx([10 * time for time in fast])
    assert times(poisson) == times(poisson, rate=5.0)
    at_once = workload({"kind": "at_once"}, requests=100)
    assert times(poisson, rate=math.inf) == times(at_once) == [0.0] * 100
    assert statistics_of(at_once.draw(vocab_size=10)).rate == math.inf
    assert times(at_once, rate=1.0) == slow
    # Prompts are the same whatever the rate is.
    draws = [poisson.draw(vocab_size=1000, rate=rate) for rate in (1.0, 10.0)]
    assert [r.prompt_token_ids for r in draws[0]] == [r.prompt_token_ids for r in draws[1]]


def test_a_trace_is_sped_up_stretched_and_repeated(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    trace = {"file": "trace.csv"}
    plain = workload_from_options({"trace": trace}, base=tmp_path)
    assert times(plain) == [0.0, 2.0, 3.0, 7.0]
    assert times(plain, num_requests=2) == [0.0, 2.0]
    again = times(plain, num_requests=6)
    assert again[4] == pytest.approx(7.0 + 7.0 / 3)
    assert again[5] == pytest.approx(again[4] + 2.0)
    fast = workload_from_options({"trace": trace, "arrivals": {"kind": "trace", "speedup": 2}}, base=tmp_path)
    assert times(fast) == [0.0, 1.0, 1.5, 3.5]
    at_rate = workload_from_options({"trace": trace, "arrivals": {"kind": "trace", "rate": 6}}, base=tmp_path)
    assert times(at_rate)[-1] == pytest.approx(3 / 6)
    assert times(plain, rate=0.5) == pytest.approx([0.0, 12 / 7, 18 / 7, 6.0])
    (tmp_path / "a.csv").write_text("arrival_s\n0\n3\n")
    (tmp_path / "b.csv").write_text("input_tokens,output_tokens\n7,8\n9,10\n")
    both = {"trace": {"file": "b.csv"}, "arrivals": {"kind": "trace", "file": "a.csv"}}
    work = workload_from_options(both, base=tmp_path).draw(vocab_size=10)
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work] == [(0.0, 7, 8), (3.0, 9, 10)]
    with pytest.raises(ConfigError, match="no arrival times"):
        workload_from_options({"trace": {"file": "b.csv"}}, base=tmp_path).draw(vocab_size=10)
    shuffled = {"trace": {"file": "b.csv", "order": "random"}, "arrivals": {"kind": "trace"}}
    with pytest.raises(ConfigError, match="random order"):
        workload_from_options(shuffled, base=tmp_path)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ({"kind": "poison", "rate": 1}, "Did you mean 'poisson'?"),
        ({"kind": "poisson"}, "arrivals: 'rate' is needed"),
        ({"kind": "poisson", "rate": 0}, "rate must be a number above 0"),
        ({"kind": "poisson", "rate": 1, "cv": 2}, "there is no 'cv' here"),
        ({"kind": "gamma", "rate": 1, "cv": -1}, "cv must be a number of at least 0"),
        ({"kind": "trace"}, "need its 'file'"),
        ({"kind": "trace", "file": "x", "speedup": 2, "rate": 1}, "not both"),
    ],
)
def test_errors(arrivals: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload(arrivals)
    assert message in str(caught.value)


def test_a_trace_as_azure_publishes_it(tmp_path: Path) -> None:
    """Dates with seven digits after the second's point, and DOS line ends, as in AzureLLMInferenceTrace_conv.csv."""
    rows = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44")
    text = "\r\n".join((*rows, "2023-11-16 18:15:50.9951690,396,109", ""))
    (tmp_path / "conv.csv").write_bytes(text.encode())
    found = workload_from_options({"trace": {"file": "conv.csv"}}, base=tmp_path).draw(vocab_size=10)
    assert [request.arrival_s for request in found] == pytest.approx([0.0, 4.314579], abs=2e-6)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in found] == [(374, 44), (396, 109)]


@pytest.mark.parametrize("rate", [1e-308, 1e-12])
def test_times_too_far_apart_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="A rate must be above 0"):
        workload({"kind": "at_once"}).draw(vocab_size=10, rate=-rate)
    with pytest.raises(ConfigError, match="31 years"):
        times(workload({"kind": "poisson", "rate": rate}, requests=100))
    with pytest.raises(ConfigError, match="31 years"):
        times(workload({"kind": "poisson", "rate": 1.0}, requests=100), rate=rate)
