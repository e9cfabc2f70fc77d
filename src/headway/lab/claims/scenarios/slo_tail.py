"""Deadlines: the tail of interactive requests beside work that has time."""

from __future__ import annotations

from headway.lab.bench.slo import Targets, attainment
from headway.lab.bench.timelines import RequestTimeline, percentile
from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.load_search import saturation
from headway.lab.claims.place import Run
from headway.lab.claims.words import change, milliseconds, percent, sentences
from headway.lab.claims.works import Drawn, chat, with_options
from headway.lab.workload.requests import BenchRequest

_LOADS = (0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
_WANTED_SHARE = 0.6
"""Of promises that order of arrival still keeps."""
_TARGETS = Targets(ttft_s=0.5, tpot_s=0.05)
_MAX_NUM_SEQS = 64
_PUBLISHED = -0.34


def measure(context: Context) -> Outcome:
    drawn = chat(context, context.sized(tiny=40, short=800, full=2000, gpu=800))
    rate, work, fcfs = _loaded(context, drawn)
    runs = {"fcfs": fcfs, "slo": context.run("slo", work, scheduling_policy="slo", max_num_seqs=_MAX_NUM_SEQS)}
    tails = {policy: percentile([line.ttft_s for line in _interactive(run)], 99) for policy, run in runs.items()}
    ends = {policy: percentile([line.e2e_s for line in _interactive(run)], 99) for policy, run in runs.items()}
    ttft, e2e = change(tails["slo"], tails["fcfs"]), change(ends["slo"], ends["fcfs"])
    return Outcome(
        value=100 * e2e,
        unit="% P99 latency",
        ours=f"P99 of interactive requests: to the first token {percent(ttft, signed=True)}, to the last "
        f"{percent(e2e, signed=True)}",
        workload=f"{len(work):,} requests, {drawn.text}, half of them interactive (0.5 s to the first token, 50 ms "
        f"between tokens); Poisson, {rate:.3g}/s; at most {_MAX_NUM_SEQS} at a time",
        differs=_differs(runs, ttft, e2e),
        where=context.where,
        chart=Chart(
            "P99 latency of interactive and other requests",
            "seconds, log",
            bars={
                f"{policy}: {name}": percentile([line.e2e_s for line in lines], 99)
                for name, choose in (("interactive", _interactive), ("others", _others))
                for policy, run in runs.items()
                for lines in [choose(run)]
            },
            log_y=True,
        ),
        numbers={
            policy: {
                "interactive TTFT P99, ms": 1e3 * tails[policy],
                "interactive E2E P99, ms": 1e3 * ends[policy],
                "others E2E P99, ms": 1e3 * percentile([line.e2e_s for line in _others(run)], 99),
                "targets kept, %": 100 * attainment(_interactive(run), _TARGETS).share,
                "output tokens/s": run.output_tok_s,
            }
            for policy, run in runs.items()
        },
    )


def _loaded(context: Context, drawn: Drawn) -> tuple[float, list[BenchRequest], Run]:
    """The lowest of some loads at which order of arrival breaks many promises: (rate, its work, what came of it)."""
    top = saturation(context, "fcfs", drawn, max_num_seqs=_MAX_NUM_SEQS)
    promises = {"ttft_target_s": _TARGETS.ttft_s, "tpot_target_s": _TARGETS.tpot_s}
    options = [promises if place % 2 else {} for place in range(len(drawn.work))]
    for load in _LOADS:
        rate = load * top
        work = with_options(drawn.at_rate(rate), options)
        run = context.run("fcfs", work, max_num_seqs=_MAX_NUM_SEQS)
        if attainment(_interactive(run), _TARGETS).share <= _WANTED_SHARE:
            break
    return rate, work, run


def _interactive(run: Run) -> list[RequestTimeline]:
    return list(run.timelines[1::2])


def _others(run: Run) -> list[RequestTimeline]:
    return list(run.timelines[::2])


def _differs(runs: dict[str, Run], ttft: float, e2e: float) -> str:
    kept = {policy: attainment(_interactive(run), _TARGETS).share for policy, run in runs.items()}
    others = {policy: percentile([line.e2e_s for line in _others(run)], 99) for policy, run in runs.items()}
    return sentences(
        [
            f"Interactive requests kept {percent(kept['slo'])} of their targets instead of {percent(kept['fcfs'])}.",
            f"Published are {percent(_PUBLISHED, signed=True)}. An order changes who waits, so the first token comes "
            f"sooner ({percent(ttft, signed=True)}); the last one less so ({percent(e2e, signed=True)}), since the "
            "longest answers spend most of their time generating.",
            f"The others pay: their P99 is {milliseconds(others['slo'])} instead of {milliseconds(others['fcfs'])}.",
        ]
    )


CLAIM = Claim(
    id="slo-tail",
    title="Deadlines and tail latency",
    published="Scheduling that knows about service-level objectives lowers P99 latency by 34%.",
    source="Quoted in surveys of SLO-aware schedulers, without a single origin",
    workload="interactive requests beside others",
    method="Policy slo against fcfs, the same arrivals, so many that fcfs keeps at most 60% of its promises.",
    measure=measure,
    engine="asked",
)
