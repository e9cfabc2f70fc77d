"""Batch size against throughput."""

from __future__ import annotations

from headway.lab.claims.chart import Chart, Line
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.turns import Way, take_turns
from headway.lab.claims.words import milliseconds, sentences, times
from headway.lab.claims.works import equal

_SIZES = (1, 8, 32)
_PUBLISHED = (1.0, 6.0, 15.0)


def measure(context: Context) -> Outcome:
    num_in, num_out = 128 // context.divisor, 256 // context.divisor
    drawn = equal(context, _SIZES[-1], num_in=num_in, num_out=num_out)
    turns = take_turns(context, {f"batch of {size}": Way(drawn.at_once(size), {}) for size in _SIZES})
    rates = [run.output_tok_s for run in turns.best.values()]
    ratios = [rate / rates[0] for rate in rates]
    steps_s = [size / rate for size, rate in zip(_SIZES, rates)]
    return Outcome(
        value=ratios[-1],
        unit="× at 32",
        ours=" / ".join(times(ratio) for ratio in ratios),
        workload=f"{drawn.text}, {' / '.join(map(str, _SIZES))} requests at once{context.divided}",
        differs=sentences([_differs(ratios, steps_s), turns.spread(f"batch of {_SIZES[-1]}", f"batch of {_SIZES[0]}")]),
        where=context.where,
        chart=Chart(
            "Throughput over the size of the batch",
            "times the throughput of one request",
            lines=(
                Line("ours", list(_SIZES), ratios),
                Line("published", list(_SIZES), list(_PUBLISHED)),
                Line("each request as fast as alone", list(_SIZES), list(map(float, _SIZES))),
            ),
            x="requests in the batch",
            log_x=True,
            log_y=True,
        ),
        numbers={
            f"{size} at once": {"output tokens/s": rate, "to one": ratio, "ms per step": 1e3 * step_s}
            for size, rate, ratio, step_s in zip(_SIZES, rates, ratios, steps_s)
        },
    )


def _differs(ratios: list[float], steps_s: list[float]) -> str:
    growth = steps_s[-1] / steps_s[0]
    if ratios[-1] > _PUBLISHED[-1]:
        return sentences(
            [
                f"A step for 32 requests takes {times(growth)} the time of one for a single request "
                f"({milliseconds(steps_s[-1])} against {milliseconds(steps_s[0])}, prompts included): reading the "
                "weights is nearly all of it, so the gain is larger than published, where more of a step grew with the "
                "batch.",
            ]
        )
    return sentences(
        [
            f"A step for 32 requests takes {times(growth)} the time of one for a single request "
            f"({milliseconds(steps_s[-1])} against {milliseconds(steps_s[0])}, prompts included): so most "
            "of it must be arithmetic, each request's own, and not reading the weights, which they share.",
        ]
    )


CLAIM = Claim(
    id="batch-size",
    title="Batch size and throughput",
    published="A batch of 8 gives 6× the throughput of one request, a batch of 32 gives 15×.",
    source="Rule of thumb from serving guides, without a single origin",
    workload="equal requests, batches of 1, 8 and 32",
    method="Equal requests all at once, 128 tokens in and 256 out; output tokens per second.",
    measure=measure,
    engine="always",
)
