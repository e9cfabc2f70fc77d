"""Magnus: batches of requests with about the same predicted length, and the highest response ratio first."""

from __future__ import annotations

from typing import Any

from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.place import Run
from headway.lab.claims.predictions import Predicted, predicted_applications
from headway.lab.claims.words import change, percent, sentences
from headway.lab.claims.works import with_options
from headway.lab.workload.requests import BenchRequest

_STATIC, _GROUPED, _HRRN = "static", "dynamic, by predicted length", "continuous, hrrn"
_KNOWN = "dynamic, by true length"
_MODES: dict[str, dict[str, Any]] = {
    _STATIC: {"batching": "static", "prefill_mode": "prefill-first"},
    _GROUPED: {"batching": "dynamic", "prefill_mode": "prefill-first"},
    _KNOWN: {"batching": "dynamic", "prefill_mode": "prefill-first"},
    _HRRN: {"batching": "continuous", "scheduling_policy": "hrrn"},
}
_MAX_NUM_SEQS = 32
_PUBLISHED_LEAST = 0.66
_LOAD = 1.2
"""Of what static batches can serve: there they begin to queue up, and that is where response times differ."""


def measure(context: Context) -> Outcome:
    predicted = predicted_applications(context, context.sized(tiny=40, short=600, full=2000, gpu=600))
    drawn = predicted.drawn
    full = {mode: _run(context, f"{mode}, all at once", mode, predicted, drawn.at_once()) for mode in _MODES}
    rate = _LOAD * full[_STATIC].requests_s
    loaded = {mode: _run(context, mode, mode, predicted, drawn.at_rate(rate)) for mode in _MODES}
    means = {mode: run.metrics.e2el.mean for mode, run in loaded.items()}
    gains = {mode: change(run.output_tok_s, full[_STATIC].output_tok_s) for mode, run in full.items()}
    falls = {mode: change(mean, means[_STATIC]) for mode, mean in means.items()}
    return Outcome(
        value=100 * gains[_HRRN],
        unit="% throughput",
        ours=f"batches by predicted length: throughput {percent(gains[_GROUPED], signed=True)}, response time "
        f"{percent(falls[_GROUPED], signed=True)}; continuous with hrrn: {percent(gains[_HRRN], signed=True)}, "
        f"{percent(falls[_HRRN], signed=True)}",
        workload=f"{len(drawn.work):,} requests, {drawn.text}; at most {_MAX_NUM_SEQS} at a time; throughput all at "
        f"once, response time at {rate:.3g}/s, {_LOAD:g} times what static batches serve; {predicted.text}",
        differs=_differs(loaded, gains, falls),
        where=context.where,
        chart=Chart(
            f"Mean response time at {_LOAD:g} times what static batches serve",
            "milliseconds from arrival to the last token",
            bars=means,
            notes={mode: f"throughput {percent(gain, signed=True)}" for mode, gain in gains.items() if mode != _STATIC},
        ),
        numbers={
            mode: {
                "output tokens/s": full[mode].output_tok_s,
                "response time, ms": means[mode],
                "response time P99, ms": loaded[mode].metrics.e2el.percentiles[99],
                "requests in the batch": loaded[mode].mean_batch,
            }
            for mode in _MODES
        },
    )


def _run(context: Context, label: str, mode: str, predicted: Predicted, work: list[BenchRequest]) -> Run:
    known = [float(one.num_output_tokens) for one in work] if mode == _KNOWN else predicted.lengths
    work = with_options(work, [{"predicted_tokens": length} for length in known])
    return context.run(label, work, max_num_seqs=_MAX_NUM_SEQS, **_MODES[mode])


def _differs(loaded: dict[str, Run], gains: dict[str, float], falls: dict[str, float]) -> str:
    return sentences(
        [
            f"Batches by predicted length give {percent(gains[_GROUPED], signed=True)} of throughput and "
            f"{percent(falls[_GROUPED], signed=True)} of response time (by true length "
            f"{percent(gains[_KNOWN], signed=True)} and {percent(falls[_KNOWN], signed=True)}); published are +66% to "
            "+234% and −60% to −90%.",
            "A static batch is cheaper here than in the paper: it is not padded and its finished requests compute "
            "nothing, so that grouping has less to save."
            if gains[_GROUPED] < _PUBLISHED_LEAST
            else "",
            "The response time is that of a load which static batches cannot keep up with. A batch of one class has to "
            f"be filled from fewer requests: {loaded[_GROUPED].mean_batch:.1f} were in it on average at this load, "
            f"{loaded[_STATIC].mean_batch:.1f} in a static one.",
            f"Letting requests come and go at every step gives {percent(gains[_HRRN], signed=True)} and "
            f"{percent(falls[_HRRN], signed=True)} and needs no prediction for it; hrrn then only orders those that "
            "wait.",
        ]
    )


CLAIM = Claim(
    id="magnus",
    title="Batches by predicted length",
    published="Batching by predicted length, highest response ratio next: +66–234% throughput, −60–90% response time.",
    source="Cheng et al., Magnus (2024); against static batching, ChatGLM-6B",
    workload="several applications with predictable answer lengths",
    method="Static batches, batches of one predicted length class, and continuous batching with policy hrrn.",
    measure=measure,
    engine="asked",
)
