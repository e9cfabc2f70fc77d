"""Static against continuous batching, without and with paging."""

from __future__ import annotations

from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.scenarios.era_runs import CHUNKED, RESERVED, STATIC, EraRuns, era_runs
from headway.lab.claims.words import milliseconds, sentences, times

_CONTINUOUS, _PAGED, _KERNELS = 8.0, 23.0, 4.0


def measure(context: Context) -> Outcome:
    eras = era_runs(context)
    reserved, paged = eras.ratio(RESERVED), eras.ratio(CHUNKED)
    return Outcome(
        value=paged,
        unit="× static",
        ours=f"{times(reserved)} continuous, {times(paged)} with paging and chunked prefill",
        workload=eras.workload,
        differs=_differs(eras, reserved, paged),
        where=context.where,
        chart=Chart(
            "Throughput of the same requests in the same KV memory",
            "prompt and output tokens per second",
            bars={mode: run.total_tok_s for mode, run in eras.runs.items()},
            notes={mode: f"{times(eras.ratio(mode))} static" for mode in eras.runs},
        ),
        numbers=eras.numbers,
    )


def _differs(eras: EraRuns, reserved: float, paged: float) -> str:
    static, best = eras.runs[STATIC], eras.runs[CHUNKED]
    batch = best.mean_batch / static.mean_batch if static.mean_batch else 1.0
    return sentences(
        [
            "The published base is a slower program: static batching with optimised kernels was already "
            f"{times(_KERNELS)} it. With the same kernels on both sides, as here, the published ratios are "
            f"{times(_CONTINUOUS / _KERNELS)} and {times(_PAGED / _KERNELS)}; here they are {times(reserved)} and "
            f"{times(paged)}.",
            f"The batch holds {static.mean_batch:.1f} requests when static and {best.mean_batch:.1f} at the end, "
            f"{times(batch)} as many, of which those of a static batch that are done compute nothing.",
            f"A step takes {milliseconds(static.mean_step_s)} on average when static and "
            f"{milliseconds(best.mean_step_s)} at the end: "
            + (
                "a larger batch costs little here, since most of a step is reading the weights."
                if best.mean_step_s / static.mean_step_s < 0.5 * (1 + batch)
                else "here a step takes longer the more requests compute in it, so that there is little to gain."
            ),
            eras.turns.spread(CHUNKED, STATIC),
        ]
    )


CLAIM = Claim(
    id="eras",
    title="Static to continuous batching",
    published="Continuous batching gives 8× the throughput of static batching, 23× with paged KV memory; else 3–8×.",
    source="Anyscale, How continuous batching enables 23x throughput (2023); OPT-13B, A100 40 GB",
    workload="1,000 prompts of 512 tokens at once, answers exponential with mean 128, up to 1,536",
    method="One engine, one KV memory (12,288 tokens, about what OPT-13B leaves on 40 GB), four ways to use it.",
    measure=measure,
    engine="always",
)
