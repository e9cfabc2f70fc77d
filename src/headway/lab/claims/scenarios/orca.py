"""Orca: how much more load continuous batching takes at the same latency."""

from __future__ import annotations

import statistics
from typing import Any

from headway.lab.bench.capacity_search import Capacity
from headway.lab.bench.online_metrics import Objective
from headway.lab.claims.chart import Chart, Line
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.load_search import NORMALISED, Span, capacity_of, saturation
from headway.lab.claims.words import milliseconds, sentences, times
from headway.lab.claims.works import orca

_STATIC, _DYNAMIC, _CONTINUOUS = "static, reserved", "dynamic, reserved", "continuous, paged"
_MODES: dict[str, dict[str, Any]] = {
    _STATIC: {"batching": "static", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    _DYNAMIC: {"batching": "dynamic", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    _CONTINUOUS: {},
}
_BOUND = 2.0
_PUBLISHED = 36.9


def measure(context: Context) -> Outcome:
    part = context.divisor
    max_model_len = 640 // part
    span = Span(
        seconds=10.0 if context.is_quick else 30.0, least=100, most=context.sized(tiny=100, short=1500, full=4000)
    )
    drawn = orca(context, span.most)
    lone = context.run("one at a time", drawn.at_rate(0.01, 12), max_model_len=max_model_len)
    bound_s = _BOUND * statistics.median(lone.per_token_s)
    start = 0.25 * saturation(context, "continuous", drawn, max_model_len=max_model_len)
    found = {
        mode: capacity_of(
            context,
            mode,
            drawn,
            [Objective(NORMALISED, 1e3 * bound_s)],
            start=start,
            span=span,
            max_model_len=max_model_len,
            **options,
        )
        for mode, options in _MODES.items()
    }
    rates = {mode: capacity.rate or 0.0 for mode, capacity in found.items()}
    best_old = max(rates[_STATIC], rates[_DYNAMIC])
    gain = rates[_CONTINUOUS] / best_old if best_old else float("inf")
    return Outcome(
        value=gain,
        unit="× static",
        ours=f"{times(gain)} the rate at a median of {milliseconds(bound_s)} per token",
        workload=f"{drawn.text}, Poisson, up to {span.most:,} requests at each rate{context.divided}",
        differs=_differs(context, found, rates, bound_s, gain),
        where=context.where,
        chart=Chart(
            "Median latency per token against load",
            "median of (end − arrival) / tokens, ms",
            lines=tuple(_line(mode, capacity) for mode, capacity in found.items()),
            x="requests per second",
            log_x=True,
            log_y=True,
            levels={f"twice a lone request's: {1e3 * bound_s:.3g} ms": 1e3 * bound_s},
            caption="The rates that the search tried: a mode's capacity is where its line crosses the bound.",
        ),
        numbers={mode: {"requests/s at the bound": rate} for mode, rate in rates.items()},
    )


def _line(mode: str, capacity: Capacity) -> Line:
    probes = sorted(capacity.probes, key=lambda probe: probe.rate)
    ys = [float(probe.metrics.as_json()[NORMALISED] or 0.0) for probe in probes]
    return Line(mode, [probe.rate for probe in probes], ys)


def _differs(context: Context, found: dict[str, Capacity], rates: dict[str, float], bound_s: float, gain: float) -> str:
    best = found[_CONTINUOUS].best
    return sentences(
        [
            f"At the bound, twice a lone request's latency, static takes {rates[_STATIC]:.3g}, "
            f"dynamic {rates[_DYNAMIC]:.3g} and continuous batching {rates[_CONTINUOUS]:.3g} requests/s.",
            f"Published are {times(_PUBLISHED)} for a model of 175 billion parameters on 16 GPUs, whose base pads "
            "prompts, keeps computing for requests that are done and, since batches are formed outside of it, often "
            "runs small ones. Here both sides have the same kernels: static batches are as large as the limit of "
            f"{context.place.max_num_seqs} allows, are not padded, and finished requests compute nothing."
            if gain < _PUBLISHED
            else "",
            f"Continuous batching had {best.metrics.peak_in_flight} requests in flight at most." if best else "",
        ]
    )


CLAIM = Claim(
    id="orca",
    title="Load at the same latency",
    published="Iteration-level scheduling takes 36.9× the load of FasterTransformer at equal median latency per token.",
    source="Yu et al., Orca (OSDI 2022); GPT-3 175B",
    workload="in U(32, 512), out U(1, 128), Poisson",
    method="The highest Poisson rate at which the median normalised latency stays under twice that of a lone request.",
    measure=measure,
    engine="asked",
)
