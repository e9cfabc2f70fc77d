"""Shortest first by a learned ranking, against order of arrival and against an oracle."""

from __future__ import annotations

import statistics

from headway.lab.claims.chart import Chart, Line
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.load_search import saturation
from headway.lab.claims.place import Run
from headway.lab.claims.predictions import PREDICTED, TAU, Predicted, predicted_chat
from headway.lab.claims.words import milliseconds, percent, sentences, times
from headway.lab.claims.works import with_options

_LOADS = (0.9, 1.2, 1.5)
"""Arrivals, as a multiple of what can be served; the last one is what the numbers are of."""
_MAX_NUM_SEQS = 64
_FCFS, _RANKED, _ORACLE = "fcfs", "ranked", "oracle"
_POLICIES = {_FCFS: "fcfs", _RANKED: "sjf", _ORACLE: "sjf"}


def measure(context: Context) -> Outcome:
    predicted = predicted_chat(context, context.sized(tiny=40, short=1000, full=3000, gpu=800))
    drawn = predicted.drawn
    top = saturation(context, "fcfs", drawn, max_num_seqs=_MAX_NUM_SEQS)
    loads = _LOADS if context.where == "simulator" else _LOADS[-1:]
    by_load = {load: _runs(context, predicted, load * top) for load in loads}
    runs = by_load[_LOADS[-1]]
    means = {name: _mean_s(run) for name, run in runs.items()}
    gain, best = means[_FCFS] / means[_RANKED], means[_FCFS] / means[_ORACLE]
    return Outcome(
        value=gain,
        unit="× lower latency",
        ours=f"{times(gain)} lower mean latency per token; an oracle {times(best)}",
        workload=f"{len(drawn.work):,} requests, {drawn.text}, Poisson, {_LOADS[-1] * top:.3g}/s, {_LOADS[-1]:g} times "
        f"what can be served; at most {_MAX_NUM_SEQS} at a time; {predicted.text}",
        differs=_differs(predicted, runs, gain, best),
        where=context.where,
        chart=_chart(by_load),
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


def _runs(context: Context, predicted: Predicted, rate: float) -> dict[str, Run]:
    work = predicted.drawn.at_rate(rate)
    known = {_RANKED: predicted.lengths, _ORACLE: [float(one.num_output_tokens) for one in work]}
    return {
        name: context.run(
            f"{name}, {rate:.3g} requests/s",
            with_options(work, [{"predicted_tokens": length} for length in known[name]]) if name in known else work,
            scheduling_policy=policy,
            max_num_seqs=_MAX_NUM_SEQS,
        )
        for name, policy in _POLICIES.items()
    }


def _mean_s(run: Run) -> float:
    return statistics.fmean(run.per_token_s)


def _chart(by_load: dict[float, dict[str, Run]]) -> Chart:
    title, y = "Latency per token by load and order", "mean of (end − arrival) / tokens, ms"
    if len(by_load) == 1:
        (runs,) = by_load.values()
        return Chart(title, y, bars={name: 1e3 * _mean_s(run) for name, run in runs.items()})
    lines = [Line(name, list(by_load), [1e3 * _mean_s(runs[name]) for runs in by_load.values()]) for name in _POLICIES]
    return Chart(title, y, lines=tuple(lines), x="arrivals, as a multiple of what can be served")


def _differs(predicted: Predicted, runs: dict[str, Run], gain: float, best: float) -> str:
    tails_s = {name: run.metrics.ttft.percentiles[99] / 1e3 for name, run in runs.items()}
    reached = (gain - 1) / (best - 1) if best > 1 else 1.0
    return sentences(
        [
            f"The gain is in the queue, so the overload decides it as much as the ranking: here {_LOADS[-1]:g} times "
            f"what can be served, for {milliseconds(runs[_FCFS].duration_s)}; the longer it lasts, the larger it is.",
            f"Predictions with a Kendall tau of {predicted.tau:.2f} reach {percent(reached)} of the oracle's gain; the "
            "paper ranks with a small language model that was trained on answers of the model it serves.",
            f"Long answers pay, up to what the guard against starvation allows: TTFT P99 "
            f"{milliseconds(tails_s[_RANKED])} ranked, {milliseconds(tails_s[_FCFS])} in order of arrival.",
        ]
    )


CLAIM = Claim(
    id="learned-ranking",
    title="Learned ranking of lengths",
    published="Scheduling by a learned ranking of answer lengths lowers mean latency 2.8× for chatbots, up to 6.5×.",
    source="Fu et al., Efficient LLM Scheduling by Learning to Rank (NeurIPS 2024); Llama-3-8B, A100",
    workload="ShareGPT and LMSYS chats, Poisson, up to overload",
    method=f"fcfs against sjf on predictions (a tau of {TAU} with the true lengths, or {PREDICTED} in --data-dir) and "
    "on the true lengths.",
    measure=measure,
    engine="asked",
)
