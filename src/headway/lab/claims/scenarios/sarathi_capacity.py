"""Sarathi-Serve's capacity: the load under a bound on the tail of the time between tokens."""

from __future__ import annotations

import statistics
from typing import Any

from headway.lab.bench.capacity_search import Capacity
from headway.lab.bench.online_metrics import Objective
from headway.lab.claims.chart import Chart, Line
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.load_search import Span, capacity_of, saturation
from headway.lab.claims.words import milliseconds, sentences, times
from headway.lab.claims.works import equal, sharegpt

_WHOLE, _CHUNKED = "prefill-first", "chunked"
_STRICT = 5.0
_PUBLISHED = 2.6
_MANY = 600
"""So many tokens that the last prompt is computed long before the first answer ends."""
_DELAY_MS = 2_000.0
_MARGIN = 0.8
"""Chunks are sized for this part of the bound."""


def measure(context: Context) -> Outcome:
    bound_s = _STRICT * _decode_step_s(context)
    objectives = [Objective("p99_itl_ms", 1e3 * bound_s), Objective("p50_ttft_ms", _DELAY_MS)]
    span = Span(
        seconds=30.0 if context.is_quick else 120.0,
        least=60,
        most=context.sized(tiny=40, short=400, full=1500, gpu=400),
    )
    drawn = sharegpt(context, span.most)
    modes: dict[str, dict[str, Any]] = {
        _WHOLE: {"prefill_mode": "prefill-first"},
        _CHUNKED: {"prefill_mode": "chunked", "target_itl_ms": 1e3 * _MARGIN * bound_s},
    }
    start = 0.25 * saturation(context, "chunked", drawn)
    found = {
        mode: capacity_of(context, mode, drawn, objectives, start=start, span=span, **options)
        for mode, options in modes.items()
    }
    rates = {mode: capacity.rate or 0.0 for mode, capacity in found.items()}
    gain = rates[_CHUNKED] / rates[_WHOLE] if rates[_WHOLE] else float("inf")
    return Outcome(
        value=gain,
        unit="× prefill-first",
        ours=f"{times(gain)}: {rates[_CHUNKED]:.3g} against {rates[_WHOLE]:.3g} requests/s",
        workload=f"{drawn.text}, Poisson, up to {span.most:,} requests at each rate; P99 between tokens ≤ "
        f"{milliseconds(bound_s)}, median TTFT ≤ 2 s",
        differs=_differs(found, bound_s, gain),
        where=context.where,
        chart=Chart(
            "Tail of the time between tokens against load",
            "P99 between tokens, ms",
            lines=tuple(_line(mode, capacity) for mode, capacity in found.items()),
            x="requests per second",
            log_x=True,
            log_y=True,
            levels={f"bound {1e3 * bound_s:.3g} ms": 1e3 * bound_s},
        ),
        numbers={mode: {"requests/s": rate} for mode, rate in rates.items()},
    )


def _decode_step_s(context: Context) -> float:
    """32 requests with 4,000 tokens before them: what the paper's strict bound is five times of."""
    drawn = equal(context, 32, num_in=4000, num_out=_MANY)
    run = context.run("a decode step of 32 requests", drawn.at_once())
    return statistics.median(run.timelines[0].itls_s[-20:])  # when the first one ends, all others are generating


def _line(mode: str, capacity: Capacity) -> Line:
    probes = sorted(capacity.probes, key=lambda probe: probe.rate)
    return Line(mode, [probe.rate for probe in probes], [probe.metrics.itl.percentiles[99] for probe in probes])


def _differs(found: dict[str, Capacity], bound_s: float, gain: float) -> str:
    first_miss = min((probe for probe in found[_WHOLE].probes if not probe.is_met), key=lambda p: p.rate, default=None)
    best = found[_CHUNKED].best
    return sentences(
        [
            f"The bound is {_STRICT:g} decode steps of 32 requests with 4,000 tokens each, as in the paper: "
            f"{milliseconds(bound_s)} here.",
            f"Whole prompts first missed it at {first_miss.rate:.3g} requests/s, with a P99 of "
            f"{first_miss.metrics.itl.percentiles[99]:,.3g} ms, since a step computes as many whole prompts as its "
            "budget holds."
            if first_miss is not None
            else "",
            f"With chunks the P99 is {best.metrics.itl.percentiles[99]:,.3g} ms at capacity: here chunks are sized by "
            f"time, for {_MARGIN:.0%} of the bound, in the paper by a fixed number of tokens."
            if best is not None
            else "",
            f"More than the published {times(_PUBLISHED)}: the faster the decode steps and so the tighter the bound, "
            "the fewer whole prompts it allows."
            if gain > _PUBLISHED
            else "",
        ]
    )


CLAIM = Claim(
    id="sarathi-capacity",
    title="Capacity under a bound on time between tokens",
    published="Chunked prefill serves 2.6× the load of vLLM's prefill-first under a bound on P99 time between tokens.",
    source="Agrawal et al., Sarathi-Serve (OSDI 2024); Mistral-7B, A100",
    workload="ShareGPT answered by GPT-4: in P50 1,730, P90 5,696; out P50 415, P90 834",
    method="The highest Poisson rate with P99 between tokens under 5 decode steps and a median TTFT under 2 s.",
    measure=measure,
    engine="asked",
)
