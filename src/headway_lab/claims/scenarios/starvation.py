"""Starvation: how long an order that is not that of arrival lets single requests wait, with and without a guard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway_lab.bench.timelines import RequestTimeline
from headway_lab.claims.claim import Chart, Outcome, change, milliseconds, percent, sentences
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.published_workloads import Drawn, chat, saturation, with_options
from headway_lab.claims.run import Run
from headway_lab.workload.bench_requests import BenchRequest


@dataclass(frozen=True)
class StarvationSetup:
    """The load, and the guard that is the cure."""

    load: float = 1.2
    """Arrival rate as a multiple of the capacity: the queue grows as long as requests arrive."""
    max_num_seqs: int = 64
    unimportant_every: int = 10
    """One in so many requests has a low priority."""
    ttft_target_s: float = 0.5
    """Under `slo`: the promise to the others."""
    starvation_ms: float = 300.0
    tight_stretch: float = 1.0
    """No request waits longer than it would in order of arrival, and `starvation_ms` more."""


SETUP = StarvationSetup()


@dataclass(frozen=True)
class _Way:
    """A policy with or without its guard."""

    by: str
    """What requests bring along: "length" or "importance"."""
    options: Mapping[str, Any]


_OFF: dict[str, Any] = {"starvation_ms": 0.0}
_TIGHT: dict[str, Any] = {"starvation_ms": SETUP.starvation_ms, "starvation_stretch": SETUP.tight_stretch}
_FCFS, _SJF, _PRIORITY = "order of arrival", "shortest first", "priority"
_SJF_DEFAULT, _SJF_TIGHT = f"{_SJF}, default guard", f"{_SJF}, {SETUP.starvation_ms:.0f} ms"
_SLO, _SLO_TIGHT = "slo, no guard", f"slo, {SETUP.starvation_ms:.0f} ms"
_WAYS: dict[str, _Way] = {
    _FCFS: _Way("length", {"scheduling_policy": "fcfs"}),
    _SJF: _Way("length", {"scheduling_policy": "sjf", **_OFF}),
    _SJF_DEFAULT: _Way("length", {"scheduling_policy": "sjf"}),
    _SJF_TIGHT: _Way("length", {"scheduling_policy": "sjf", **_TIGHT}),
    "highest response ratio": _Way("length", {"scheduling_policy": "hrrn"}),
    _PRIORITY: _Way("importance", {"scheduling_policy": "priority"}),
    _SLO: _Way("importance", {"scheduling_policy": "slo", **_OFF}),
    _SLO_TIGHT: _Way("importance", {"scheduling_policy": "slo", **_TIGHT}),
}


def measure_starvation(context: Context) -> Outcome:
    drawn = chat(context, context.sized(tiny=80, short=600, full=2000, gpu=600))
    seats = SETUP.max_num_seqs // context.divisor
    rate = SETUP.load * saturation(context, "fcfs", drawn, max_num_seqs=seats)
    work = _work(drawn, rate)
    runs = {name: context.run(name, work[way.by], max_num_seqs=seats, **way.options) for name, way in _WAYS.items()}
    extra = {name: _extra_s(run, runs[_FCFS]) for name, run in runs.items()}
    waits = {name: max(_waits_s(run)) for name, run in runs.items()}
    return Outcome(
        value=1e3 * extra[_SJF_TIGHT],
        unit="ms longer than in order of arrival, at most",
        ours=f"shortest first lets a request wait up to {milliseconds(extra[_SJF])} longer than order of arrival, with "
        f"the guard at {SETUP.starvation_ms:.0f} ms {milliseconds(extra[_SJF_TIGHT])}; priority "
        f"{milliseconds(extra[_PRIORITY])}, slo with that guard {milliseconds(extra[_SLO_TIGHT])}",
        workload=f"{len(drawn.work):,} requests, {drawn.text}, Poisson, {rate:.3g}/s, {SETUP.load:g} times what can be "
        f"served; at most {seats} at a time; lengths known; one in {SETUP.unimportant_every} is "
        f"unimportant{context.divided}",
        differs=_differs(runs, extra, waits),
        where=context.where,
        chart=Chart(
            f"The longest wait for a first token at {SETUP.load:g} times what can be served",
            "seconds",
            bars=waits,
            notes={name: f"mean latency {run.metrics.e2el.mean / 1e3:.1f} s" for name, run in runs.items()},
        ),
        numbers={
            name: {
                "longest wait, s": waits[name],
                "longest beyond order of arrival, s": extra[name],
                "TTFT mean, ms": run.metrics.ttft.mean,
                "E2E mean, ms": run.metrics.e2el.mean,
                "important: TTFT mean, ms": 1e3 * _mean_s(_important(run)),
                "unimportant: longest wait, s": max(line.ttft_s for line in _unimportant(run)),
            }
            for name, run in runs.items()
        },
    )


def _work(drawn: Drawn, rate: float) -> dict[str, list[BenchRequest]]:
    """The same arrivals, with what each kind of policy reads."""
    work = drawn.at_rate(rate)
    important = {"priority": 0, "ttft_target_s": SETUP.ttft_target_s}
    return {
        "length": with_options(work, [{"predicted_tokens": float(one.num_output_tokens)} for one in work]),
        "importance": with_options(
            work, [important if place % SETUP.unimportant_every else {"priority": 1} for place in range(len(work))]
        ),
    }


def _waits_s(run: Run) -> list[float]:
    return [line.ttft_s for line in run.timelines]


def _extra_s(run: Run, fcfs: Run) -> float:
    """By how much a request waited longer than in order of arrival, at most."""
    return max(0.0, *(wait - before for wait, before in zip(_waits_s(run), _waits_s(fcfs))))


def _unimportant(run: Run) -> Sequence[RequestTimeline]:
    return run.timelines[:: SETUP.unimportant_every]


def _important(run: Run) -> Sequence[RequestTimeline]:
    return [line for place, line in enumerate(run.timelines) if place % SETUP.unimportant_every]


def _mean_s(lines: Sequence[RequestTimeline]) -> float:
    return sum(line.ttft_s for line in lines) / len(lines)


def _differs(runs: Mapping[str, Run], extra: Mapping[str, float], waits: Mapping[str, float]) -> str:
    gains = {
        name: percent(change(run.metrics.e2el.mean, runs[_FCFS].metrics.e2el.mean), signed=True)
        for name, run in runs.items()
    }
    low = {name: max(line.ttft_s for line in _unimportant(run)) for name, run in runs.items()}
    means = {name: _mean_s(_important(run)) for name, run in runs.items()}
    return sentences(
        [
            f"A wait of {SETUP.starvation_ms:.0f} ms alone is no sign of starvation: in overload all wait, up to "
            f"{milliseconds(waits[_FCFS])} in order of arrival. So the guard lifts a request when it has waited so "
            f"much longer than it would have in that order, and then it still waits for a seat: "
            f"{milliseconds(extra[_SJF_TIGHT])} at most.",
            f"The price is in mean latency: {gains[_SJF]} against order of arrival without a guard, "
            f"{gains[_SJF_DEFAULT]} with the default one, which allows ten times the wait in order of arrival, and "
            f"{gains[_SJF_TIGHT]} with the tight one; the longest waits are {milliseconds(waits[_SJF])}, "
            f"{milliseconds(waits[_SJF_DEFAULT])} and {milliseconds(waits[_SJF_TIGHT])}.",
            "The policy priority has no guard on purpose: what is unimportant waits while anything important does, "
            f"here {milliseconds(low[_PRIORITY])}. Where that must be bounded, a target of time takes its place: with "
            f"slo {milliseconds(low[_SLO_TIGHT])}, and important requests have their first token after "
            f"{milliseconds(means[_SLO_TIGHT])} instead of {milliseconds(means[_PRIORITY])} in the mean.",
        ]
    )


STARVATION = Claim(
    id="starvation",
    title="Starvation and its cure",
    published="Raising the priority of a request after 200–500 ms of waiting bounds how long any request waits.",
    source="Guides to serving engines; Fu et al. (NeurIPS 2024) for a learned ranking",
    workload="overload under shortest-first and priority scheduling",
    method="The same arrivals at 1.2 times capacity: policies without a guard, with the default one, with a tight one.",
    measure=measure_starvation,
    engine="asked",
)
