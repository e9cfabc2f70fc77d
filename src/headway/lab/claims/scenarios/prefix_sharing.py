"""Prompts that begin alike."""

from __future__ import annotations

from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.place import Run
from headway.lab.claims.turns import Way, take_turns
from headway.lab.claims.words import milliseconds, sentences, times
from headway.lab.claims.works import shared_prefix

_PREFIX, _TAIL, _OUT = 4_096, 64, 64
_PUBLISHED = 6.4
_OFF, _ON = "prefix cache off", "prefix cache on"
_STATES = {_OFF: False, _ON: True}


def measure(context: Context) -> Outcome:
    part = context.divisor
    count = context.sized(tiny=8, short=64, full=64)
    prefix, tail, out = _PREFIX // part, _TAIL // part, _OUT // part
    drawn = shared_prefix(context, count, prefix=prefix, tail=tail, out=out)
    turns = take_turns(
        context, {name: Way(drawn.at_once(), {"enable_prefix_caching": state}) for name, state in _STATES.items()}
    )
    runs = turns.best
    off, on = runs.values()
    gain = on.output_tok_s / off.output_tok_s
    return Outcome(
        value=gain,
        unit="× without",
        ours=f"{times(gain)} the output tokens per second",
        workload=f"{drawn.text}{context.divided}",
        differs=sentences([_differs(off, on, gain, count=count, prefix=prefix, tail=tail), turns.spread(_ON, _OFF)]),
        where=context.where,
        chart=Chart(
            "Requests with a common beginning",
            "output tokens per second",
            bars={name: run.output_tok_s for name, run in runs.items()},
            notes={_ON: times(gain)},
        ),
        numbers={
            name: {
                "output tokens/s": run.output_tok_s,
                "TTFT P50, ms": run.metrics.ttft.percentiles[50],
                "duration, s": run.duration_s,
            }
            for name, run in runs.items()
        },
    )


def _differs(off: Run, on: Run, gain: float, *, count: int, prefix: int, tail: int) -> str:
    computed = count * (prefix + tail) / (prefix + count * tail)
    return sentences(
        [
            f"With the cache {times(computed)} fewer prompt tokens are computed; the time falls by {times(gain)}, "
            "since what is left is generating, which the cache does not shorten.",
            f"{times(_PUBLISHED)} is the best of several published workloads, which share less or more than this one; "
            "the longer the common part against the rest, the larger the gain.",
            f"Half of the requests had their first token after {milliseconds(on.metrics.ttft.percentiles[50] / 1e3)} "
            f"instead of {milliseconds(off.metrics.ttft.percentiles[50] / 1e3)}.",
        ]
    )


CLAIM = Claim(
    id="prefix-sharing",
    title="Sharing prefixes",
    published="Reusing the KV blocks of common prefixes gives up to 6.4× the throughput (5–10× by other accounts).",
    source="Zheng et al., SGLang / RadixAttention (2023)",
    workload="prompts with a long common part: few-shot examples, agents, documents",
    method="The same requests at once, 4,096 common and 64 own tokens in, 64 out, with the prefix cache off and on.",
    measure=measure,
    engine="always",
)
