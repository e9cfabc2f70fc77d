"""Two numbers that articles quote of papers whose others are measured in `scheduling_policies`, from the same runs:
the throughput of a learned ranking, and the mean latency of batches by predicted length."""

from __future__ import annotations

from collections.abc import Mapping

from headway_lab.claims.claim import Chart, Line, Outcome, change, percent, sentences
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.run import Run
from headway_lab.claims.scenarios.scheduling_policies import (
    FCFS,
    GROUPED,
    HRRN,
    MAGNUS_LOAD,
    ORACLE,
    RANKED,
    RANKING_MAX_NUM_SEQS,
    SEALED,
    magnus_run,
    magnus_runs,
    ranking_runs,
)

# ---- how many requests a learned ranking answers while they arrive --------------------------------------------------

_PUBLISHED = {"ranking": 0.237, "magnus": -0.228}
"""Changes of throughput and of mean latency."""


def measure_ranking_throughput(context: Context) -> Outcome:
    ranking = ranking_runs(context)
    answered = {load: {name: answered_s(run) for name, run in runs.items()} for load, runs in ranking.by_load.items()}
    gains = {load: change(rates[RANKED], rates[FCFS]) for load, rates in answered.items()}
    last, top = answered[ranking.highest], ranking.highest
    tokens = change(*(ranking.by_load[top][name].total_tok_s for name in (RANKED, FCFS)))
    title, y = "Requests answered while others arrive, by load and order", "requests per second, until the last arrival"
    if len(answered) == 1:
        chart = Chart(title, y, bars=last)
    else:
        lines = tuple(
            Line(name, list(answered), [rates[name] for rates in answered.values()]) for name in (FCFS, RANKED, ORACLE)
        )
        chart = Chart(title, y, lines=lines, x="arrivals, as a multiple of what can be served")
    return Outcome(
        value=100 * gains[top],
        unit="% answered",
        ours=f"{percent(gains[top], signed=True)} requests answered per second while others arrive; tokens per second "
        f"over the whole run {percent(tokens, signed=True)}",
        workload=ranking.workload,
        differs=_ranking_differs(gains, change(last[ORACLE], last[FCFS]), tokens),
        where=context.where,
        chart=chart,
        numbers={
            f"{name}, load {load:g}": {
                "answered/s": rates[name],
                "to fcfs, %": 100 * change(rates[name], rates[FCFS]),
                "tokens/s": ranking.by_load[load][name].total_tok_s,
            }
            for load, rates in answered.items()
            for name in (FCFS, RANKED, ORACLE)
        },
    )


def answered_s(run: Run) -> float:
    """Requests that had their last token before the last one arrived, per second."""
    last_s = max(line.arrival_s for line in run.timelines)
    return sum(line.token_times_s[-1] <= last_s for line in run.timelines) / last_s


def _ranking_differs(gains: Mapping[float, float], best: float, tokens: float) -> str:
    by_load = ", ".join(f"{percent(gain, signed=True)} at {load:g}" for load, gain in gains.items())
    place = "more" if max(gains.values()) > _PUBLISHED["ranking"] else "less"
    return sentences(
        [
            f"The gain grows with the load: {by_load} times what can be served; an oracle {percent(best, signed=True)} "
            "at the last.",
            f"That is {place} than the published +{100 * _PUBLISHED['ranking']:.1f}%: it depends on how long "
            "arrivals exceed what can be served, for as long as long answers can be put off; no source says for how "
            "long that was.",
            f"An order does not make steps faster: over the whole run, until the long answers are done too, tokens per "
            f"second change by {percent(tokens, signed=True)}.",
        ]
    )


RANKING_THROUGHPUT = Claim(
    id="ranking-throughput",
    title="Learned ranking's throughput",
    published="A learned ranking of lengths gives +23.7% throughput over order of arrival; over 15% at high traffic.",
    source="Articles on continuous batching, of Fu et al., Learning to Rank (NeurIPS 2024); A100",
    workload="chat requests at high traffic",
    method=f"The runs of learned-ranking (at most {RANKING_MAX_NUM_SEQS} at a time): requests that are answered until "
    "the last one arrives, per second.",
    measure=measure_ranking_throughput,
    engine="asked",
)


# ---- the mean latency of batches by predicted length, by load -------------------------------------------------------

_LATENCY_LOADS = (0.6, 1.8)
"""Besides the load of the claim `magnus`."""
_LATENCY_MODES = (SEALED, GROUPED, HRRN)


def measure_magnus_latency(context: Context) -> Outcome:
    runs = magnus_runs(context)
    measured = {load: {mode: _loaded(context, load, mode) for mode in _LATENCY_MODES} for load in _LATENCY_LOADS}
    by_load = {**measured, MAGNUS_LOAD: runs.loaded}
    means_ms = {
        load: {mode: by_load[load][mode].metrics.e2el.mean for mode in _LATENCY_MODES} for load in sorted(by_load)
    }
    changes = {
        mode: {load: change(means[mode], means[SEALED]) for load, means in means_ms.items()} for mode in (GROUPED, HRRN)
    }
    grouped, continuous = changes[GROUPED][MAGNUS_LOAD], changes[HRRN][MAGNUS_LOAD]
    drawn = runs.predicted.drawn
    return Outcome(
        value=100 * grouped,
        unit="% mean latency",
        ours=f"batches by predicted length {percent(grouped, signed=True)} at {MAGNUS_LOAD:g} times what static "
        f"batches serve, continuous with hrrn {percent(continuous, signed=True)}",
        workload=f"{len(drawn.work):,} requests, {drawn.text}, Poisson, {runs.top:.3g}/s can be served by static "
        f"batches; {runs.predicted.text}",
        differs=_latency_differs(changes),
        where=context.where,
        chart=Chart(
            "Mean time from arrival to the last token, by load",
            "milliseconds, log",
            lines=tuple(
                Line(mode, list(means_ms), [means[mode] for means in means_ms.values()]) for mode in _LATENCY_MODES
            ),
            x="arrivals, as a multiple of what static batches serve",
            log_y=True,
        ),
        numbers={
            f"{mode}, load {load:g}": {
                "mean latency, ms": means[mode],
                "to static, %": 100 * change(means[mode], means[SEALED]),
            }
            for load, means in means_ms.items()
            for mode in _LATENCY_MODES
        },
    )


def _loaded(context: Context, load: float, mode: str) -> Run:
    runs = magnus_runs(context)
    work = runs.predicted.drawn.at_rate(load * runs.top)
    return magnus_run(context, f"{mode}, load {load:g}", mode, runs.predicted, work)


def _latency_differs(changes: Mapping[str, Mapping[float, float]]) -> str:
    def by_load(mode: str) -> str:
        return ", ".join(f"{percent(one, signed=True)} at {load:g}" for load, one in changes[mode].items())

    is_reached = min(changes[GROUPED].values()) <= _PUBLISHED["magnus"]
    return sentences(
        [
            f"Batches by predicted length: {by_load(GROUPED)} times what static batches serve; continuous: "
            f"{by_load(HRRN)}.",
            f"The published −{-100 * _PUBLISHED['magnus']:.1f}% is "
            + ("reached only at the highest load: " if is_reached else "not reached: ")
            + "a batch of one class waits until enough alike requests are there or its window is over, and holds fewer "
            "than a static one, which costs latency where the load is low; it pays where static batches fall behind.",
            "Static batches cost less here than in the paper, since they are not padded and finished requests compute "
            "nothing. Letting requests come and go at every step is what shortens the wait.",
        ]
    )


MAGNUS_LATENCY = Claim(
    id="magnus-latency",
    title="Mean latency of batches by predicted length",
    published="Batching by predicted length lowers mean latency by 22.8%.",
    source="Articles on continuous batching, of Cheng et al., Magnus (2024)",
    workload="several applications with predictable answer lengths",
    method="The requests of magnus at three loads: mean time from arrival to the last token, against static batches.",
    measure=measure_magnus_latency,
    engine="asked",
)
