"""Scheduling policies: a learned ranking of lengths, batches by predicted length, and deadlines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway_lab.bench.slo_targets import Targets, attainment
from headway_lab.bench.timelines import RequestTimeline, percentile
from headway_lab.claims.claim import Chart, Line, Outcome, change, milliseconds, percent, sentences, times
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.published_workloads import (
    PREDICTED,
    TAU,
    Drawn,
    Predicted,
    chat,
    predicted_applications,
    predicted_chat,
    saturation,
    with_options,
)
from headway_lab.claims.run import Run
from headway_lab.workload.bench_requests import BenchRequest

# ---- shortest first by a learned ranking, against order of arrival and against an oracle ----------------------------

_RANKING_LOADS = (0.9, 1.2, 1.5)
"""Arrival rates as a multiple of the capacity; the numbers come from the last one."""
RANKING_MAX_NUM_SEQS = 64
FCFS, RANKED, ORACLE = "fcfs", "ranked", "oracle"


@dataclass(frozen=True)
class RankingRuns:
    """The same arrivals in three orders, at several loads."""

    predicted: Predicted
    top: float
    """The requests per second that can be served."""
    by_load: Mapping[float, Mapping[str, Run]]
    """Load → order → run. Loads rise."""

    @property
    def highest(self) -> float:
        return max(self.by_load)

    @property
    def workload(self) -> str:
        drawn = self.predicted.drawn
        return (
            f"{len(drawn.work):,} requests, {drawn.text}, Poisson, {self.highest * self.top:.3g}/s, "
            f"{self.highest:g} times what can be served; at most {RANKING_MAX_NUM_SEQS} at a time; "
            f"{self.predicted.text}"
        )


def ranking_runs(context: Context) -> RankingRuns:
    """The runs that several claims need, measured once."""
    return context.once("learned ranking", lambda: _measure_ranking_runs(context))


def _measure_ranking_runs(context: Context) -> RankingRuns:
    predicted = predicted_chat(context, context.sized(tiny=40, short=1000, full=3000, gpu=800))
    top = saturation(context, "fcfs", predicted.drawn, max_num_seqs=RANKING_MAX_NUM_SEQS)
    loads = _RANKING_LOADS if context.where == "simulator" else _RANKING_LOADS[-1:]
    return RankingRuns(predicted, top, {load: _ranked_runs(context, predicted, load * top) for load in loads})


def measure_learned_ranking(context: Context) -> Outcome:
    ranking = ranking_runs(context)
    runs = ranking.by_load[ranking.highest]
    means = {name: mean_per_token_s(run) for name, run in runs.items()}
    gain, best = means[FCFS] / means[RANKED], means[FCFS] / means[ORACLE]
    return Outcome(
        value=gain,
        unit="× lower latency",
        ours=f"{times(gain)} lower mean latency per token; an oracle {times(best)}",
        workload=ranking.workload,
        differs=_learned_ranking_differs(ranking, gain, best),
        where=context.where,
        chart=_chart(ranking.by_load),
        numbers={
            name: {
                "latency per token, ms": 1e3 * means[name],
                "TTFT mean, ms": run.metrics.ttft.mean,
                "TTFT P99, ms": run.metrics.ttft.percentiles[99],
                "E2E mean, ms": run.metrics.e2el.mean,
            }
            for name, run in runs.items()
        },
    )


def _ranked_runs(context: Context, predicted: Predicted, rate: float) -> dict[str, Run]:
    work = predicted.drawn.at_rate(rate)
    known = {FCFS: None, RANKED: predicted.lengths, ORACLE: [float(one.num_output_tokens) for one in work]}
    return {name: run_in_order(context, f"{name}, {rate:.3g} requests/s", work, known[name]) for name in known}


def run_in_order(
    context: Context, label: str, work: Sequence[BenchRequest], predictions: Sequence[float] | None
) -> Run:
    """The requests in the order of arrival, or with the shortest predicted first."""
    if predictions is not None:
        work = with_options(work, [{"predicted_tokens": length} for length in predictions])
    policy = "fcfs" if predictions is None else "sjf"
    return context.run(label, work, scheduling_policy=policy, max_num_seqs=RANKING_MAX_NUM_SEQS)


def mean_per_token_s(run: Run) -> float:
    """The mean over requests of the time from arrival to the last token, divided by the number of tokens."""
    return statistics.fmean(run.per_token_s)


def _chart(by_load: Mapping[float, Mapping[str, Run]]) -> Chart:
    title, y = "Latency per token by load and order", "mean of (end − arrival) / tokens, ms"
    if len(by_load) == 1:
        (runs,) = by_load.values()
        return Chart(title, y, bars={name: 1e3 * mean_per_token_s(run) for name, run in runs.items()})
    lines = [
        Line(name, list(by_load), [1e3 * mean_per_token_s(runs[name]) for runs in by_load.values()])
        for name in (FCFS, RANKED, ORACLE)
    ]
    return Chart(title, y, lines=tuple(lines), x="arrivals, as a multiple of what can be served")


def _learned_ranking_differs(ranking: RankingRuns, gain: float, best: float) -> str:
    runs = ranking.by_load[ranking.highest]
    tails_s = {name: run.metrics.ttft.percentiles[99] / 1e3 for name, run in runs.items()}
    reached = (gain - 1) / (best - 1) if best > 1 else 1.0
    return sentences(
        [
            "The gain is in the queue, so the overload decides it as much as the ranking: here "
            f"{ranking.highest:g} times what can be served, for {milliseconds(runs[FCFS].duration_s)}; the longer "
            "it lasts, the larger it is.",
            f"Predictions with a Kendall tau of {ranking.predicted.tau:.2f} reach {percent(reached)} of the oracle's "
            "gain; the paper ranks with a small language model that was trained on answers of the model it serves.",
            f"Long answers pay, up to what the guard against starvation allows: TTFT P99 "
            f"{milliseconds(tails_s[RANKED])} ranked, {milliseconds(tails_s[FCFS])} in order of arrival.",
        ]
    )


LEARNED_RANKING = Claim(
    id="learned-ranking",
    title="Learned ranking of lengths",
    published="Scheduling by a learned ranking of answer lengths lowers mean latency 2.8× for chatbots, up to 6.5×.",
    source="Fu et al., Efficient LLM Scheduling by Learning to Rank (NeurIPS 2024); Llama-3-8B, A100",
    workload="ShareGPT and LMSYS chats, Poisson, up to overload",
    method=f"fcfs against sjf on predictions (a tau of {TAU} with the true lengths, or {PREDICTED} in --data-dir) and "
    "on the true lengths.",
    measure=measure_learned_ranking,
    engine="asked",
)


# ---- batches of about the same predicted length, the highest response ratio first -----------------------------------

SEALED, GROUPED, HRRN = "static", "dynamic, by predicted length", "continuous, hrrn"
_KNOWN = "dynamic, by true length"
_MAGNUS_MODES: dict[str, dict[str, Any]] = {
    SEALED: {"batching": "static", "prefill_mode": "prefill-first"},
    GROUPED: {"batching": "dynamic", "prefill_mode": "prefill-first"},
    _KNOWN: {"batching": "dynamic", "prefill_mode": "prefill-first"},
    HRRN: {"batching": "continuous", "scheduling_policy": "hrrn"},
}
_MAGNUS_MAX_NUM_SEQS = 32
_PUBLISHED_LEAST = 0.66
MAGNUS_LOAD = 1.2
"""Arrival rate as a multiple of the capacity of static batches. At this load they begin to queue up, and response times
differ."""


@dataclass(frozen=True)
class MagnusRuns:
    """The same requests in each mode: all at once, and at a load."""

    predicted: Predicted
    full: Mapping[str, Run]
    loaded: Mapping[str, Run]

    @property
    def top(self) -> float:
        """The requests per second that static batches serve."""
        return self.full[SEALED].requests_s


def magnus_runs(context: Context) -> MagnusRuns:
    """The runs that several claims need, measured once."""
    return context.once("magnus", lambda: _measure_magnus_runs(context))


def _measure_magnus_runs(context: Context) -> MagnusRuns:
    predicted = predicted_applications(context, context.sized(tiny=40, short=600, full=2000, gpu=600))
    drawn = predicted.drawn
    full = {
        mode: magnus_run(context, f"{mode}, all at once", mode, predicted, drawn.at_once()) for mode in _MAGNUS_MODES
    }
    work = drawn.at_rate(MAGNUS_LOAD * full[SEALED].requests_s)
    loaded = {mode: magnus_run(context, mode, mode, predicted, work) for mode in _MAGNUS_MODES}
    return MagnusRuns(predicted, full, loaded)


def measure_magnus(context: Context) -> Outcome:
    runs = magnus_runs(context)
    predicted, full, loaded, rate = runs.predicted, runs.full, runs.loaded, MAGNUS_LOAD * runs.top
    drawn = predicted.drawn
    means = {mode: run.metrics.e2el.mean for mode, run in loaded.items()}
    gains = {mode: change(run.output_tok_s, full[SEALED].output_tok_s) for mode, run in full.items()}
    falls = {mode: change(mean, means[SEALED]) for mode, mean in means.items()}
    return Outcome(
        value=100 * gains[HRRN],
        unit="% throughput",
        ours=f"batches by predicted length: throughput {percent(gains[GROUPED], signed=True)}, response time "
        f"{percent(falls[GROUPED], signed=True)}; continuous with hrrn: {percent(gains[HRRN], signed=True)}, "
        f"{percent(falls[HRRN], signed=True)}",
        workload=f"{len(drawn.work):,} requests, {drawn.text}; at most {_MAGNUS_MAX_NUM_SEQS} at a time; throughput "
        f"all at once, response time at {rate:.3g}/s, {MAGNUS_LOAD:g} times what static batches serve; "
        f"{predicted.text}",
        differs=_magnus_differs(loaded, gains, falls),
        where=context.where,
        chart=Chart(
            f"Mean response time at {MAGNUS_LOAD:g} times what static batches serve",
            "milliseconds from arrival to the last token",
            bars=means,
            notes={mode: f"throughput {percent(gain, signed=True)}" for mode, gain in gains.items() if mode != SEALED},
        ),
        numbers={
            mode: {
                "output tokens/s": full[mode].output_tok_s,
                "response time, ms": means[mode],
                "response time P99, ms": loaded[mode].metrics.e2el.percentiles[99],
                "requests in the batch": loaded[mode].mean_batch,
            }
            for mode in _MAGNUS_MODES
        },
    )


def magnus_run(context: Context, label: str, mode: str, predicted: Predicted, work: list[BenchRequest]) -> Run:
    """The requests in one mode."""
    known = [float(one.num_output_tokens) for one in work] if mode == _KNOWN else predicted.lengths
    work = with_options(work, [{"predicted_tokens": length} for length in known])
    return context.run(label, work, max_num_seqs=_MAGNUS_MAX_NUM_SEQS, **_MAGNUS_MODES[mode])


def _magnus_differs(loaded: Mapping[str, Run], gains: dict[str, float], falls: dict[str, float]) -> str:
    return sentences(
        [
            f"Batches by predicted length give {percent(gains[GROUPED], signed=True)} of throughput and "
            f"{percent(falls[GROUPED], signed=True)} of response time (by true length "
            f"{percent(gains[_KNOWN], signed=True)} and {percent(falls[_KNOWN], signed=True)}); published are +66% to "
            "+234% and −60% to −90%.",
            "A static batch is cheaper here than in the paper: it is not padded and its finished requests compute "
            "nothing, so that grouping has less to save."
            if gains[GROUPED] < _PUBLISHED_LEAST
            else "",
            "The response time is that of a load which static batches cannot keep up with. A batch of one class has to "
            f"be filled from fewer requests: {loaded[GROUPED].mean_batch:.1f} were in it on average at this load, "
            f"{loaded[SEALED].mean_batch:.1f} in a static one.",
            f"Letting requests come and go at every step gives {percent(gains[HRRN], signed=True)} and "
            f"{percent(falls[HRRN], signed=True)} and needs no prediction for it; hrrn then only orders those that "
            "wait.",
        ]
    )


MAGNUS = Claim(
    id="magnus",
    title="Batches by predicted length",
    published="Batching by predicted length, highest response ratio next: +66–234% throughput, −60–90% response time.",
    source="Cheng et al., Magnus (2024); against static batching, ChatGLM-6B",
    workload="several applications with predictable answer lengths",
    method="Static batches, batches of one predicted length class, and continuous batching with policy hrrn.",
    measure=measure_magnus,
    engine="asked",
)


# ---- deadlines: interactive requests beside work that has time ------------------------------------------------------

_SLO_LOADS = (0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
_WANTED_SHARE = 0.6
"""At the chosen load, order of arrival keeps at most this share of promises."""
_TARGETS = Targets(ttft_s=0.5, tpot_s=0.05)
_SLO_MAX_NUM_SEQS = 64
_SLO_PUBLISHED = -0.34


def measure_slo_tail(context: Context) -> Outcome:
    drawn = chat(context, context.sized(tiny=40, short=800, full=2000, gpu=800))
    rate, work, fcfs = _loaded(context, drawn)
    runs = {"fcfs": fcfs, "slo": context.run("slo", work, scheduling_policy="slo", max_num_seqs=_SLO_MAX_NUM_SEQS)}
    tails = {policy: percentile([line.ttft_s for line in _interactive(run)], 99) for policy, run in runs.items()}
    ends = {policy: percentile([line.e2e_s for line in _interactive(run)], 99) for policy, run in runs.items()}
    ttft, e2e = change(tails["slo"], tails["fcfs"]), change(ends["slo"], ends["fcfs"])
    return Outcome(
        value=100 * e2e,
        unit="% P99 latency",
        ours=f"P99 of interactive requests: to the first token {percent(ttft, signed=True)}, to the last "
        f"{percent(e2e, signed=True)}",
        workload=f"{len(work):,} requests, {drawn.text}, half of them interactive (0.5 s to the first token, 50 ms "
        f"between tokens); Poisson, {rate:.3g}/s; at most {_SLO_MAX_NUM_SEQS} at a time",
        differs=_slo_tail_differs(runs, ttft, e2e),
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
    """The lowest of some loads at which order of arrival breaks many promises: (rate, its work, its run)."""
    top = saturation(context, "fcfs", drawn, max_num_seqs=_SLO_MAX_NUM_SEQS)
    promises = {"ttft_target_s": _TARGETS.ttft_s, "tpot_target_s": _TARGETS.tpot_s}
    options = [promises if place % 2 else {} for place in range(len(drawn.work))]
    for load in _SLO_LOADS:
        rate = load * top
        work = with_options(drawn.at_rate(rate), options)
        run = context.run("fcfs", work, max_num_seqs=_SLO_MAX_NUM_SEQS)
        if attainment(_interactive(run), _TARGETS).share <= _WANTED_SHARE:
            break
    return rate, work, run


def _interactive(run: Run) -> list[RequestTimeline]:
    return list(run.timelines[1::2])


def _others(run: Run) -> list[RequestTimeline]:
    return list(run.timelines[::2])


def _slo_tail_differs(runs: dict[str, Run], ttft: float, e2e: float) -> str:
    kept = {policy: attainment(_interactive(run), _TARGETS).share for policy, run in runs.items()}
    others = {policy: percentile([line.e2e_s for line in _others(run)], 99) for policy, run in runs.items()}
    return sentences(
        [
            f"Interactive requests kept {percent(kept['slo'])} of their targets instead of {percent(kept['fcfs'])}.",
            f"Published are {percent(_SLO_PUBLISHED, signed=True)}. An order changes who waits, so the first token "
            f"comes sooner ({percent(ttft, signed=True)}); the last one less so ({percent(e2e, signed=True)}), since "
            "the longest answers spend most of their time generating.",
            f"The others pay: their P99 is {milliseconds(others['slo'])} instead of {milliseconds(others['fcfs'])}.",
        ]
    )


SLO_TAIL = Claim(
    id="slo-tail",
    title="Deadlines and tail latency",
    published="Scheduling that knows about service-level objectives lowers P99 latency by 34%.",
    source="Quoted in surveys of SLO-aware schedulers, without a single origin",
    workload="interactive requests beside others",
    method="Policy slo against fcfs, the same arrivals, so many that fcfs keeps at most 60% of its promises.",
    measure=measure_slo_tail,
    engine="asked",
)
