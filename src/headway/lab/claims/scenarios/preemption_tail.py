"""The tail that preemption makes: the same load in ample and in scarce KV memory."""

from __future__ import annotations

from headway.lab.bench.timelines import percentile
from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.load_search import saturation
from headway.lab.claims.place import Run
from headway.lab.claims.words import milliseconds, percent, sentences, times
from headway.lab.claims.works import power_law

_SCARCE_TOKENS = 13_312
_LOAD = 0.9
_PUBLISHED, _PUBLISHED_SHARE = 3.8, 0.7
_MAX_MODEL_LEN = 6_144


def measure(context: Context) -> Outcome:
    drawn = power_law(context, context.sized(tiny=30, short=800, full=3000, gpu=1000))
    rate = _LOAD * saturation(context, "scarce memory", drawn, kv_tokens=_SCARCE_TOKENS, max_model_len=_MAX_MODEL_LEN)
    work = drawn.at_rate(rate)
    runs = {
        "ample memory": context.run("ample memory", work, max_model_len=_MAX_MODEL_LEN),
        "scarce memory": context.run("scarce memory", work, kv_tokens=_SCARCE_TOKENS, max_model_len=_MAX_MODEL_LEN),
    }
    ample, scarce = runs.values()
    ratio, share = _ratio(scarce), _share(ample, scarce)
    return Outcome(
        value=ratio,
        unit="× P99/P50",
        ours=f"P99 is {times(ratio)} P50 ({times(_ratio(ample))} without preemption); {percent(share)} of the P99 is "
        "due to scarce memory",
        workload=f"{len(work):,} requests, {drawn.text}, Poisson, {rate:.3g}/s; KV memory for {_SCARCE_TOKENS:,} "
        f"tokens against {context.place.kv_tokens:,}",
        differs=_differs(ample, scarce, ratio, share),
        where=context.where,
        chart=Chart(
            "Time per output token with and without preemption",
            "milliseconds per token",
            bars={f"{name}, P{p}": 1e3 * percentile(_tpots_s(run), p) for name, run in runs.items() for p in (50, 99)},
        ),
        numbers={
            name: {
                "time per token P50, ms": 1e3 * percentile(_tpots_s(run), 50),
                "time per token P99, ms": 1e3 * percentile(_tpots_s(run), 99),
                "P99/P50": _ratio(run),
                "TTFT P99, ms": run.metrics.ttft.percentiles[99],
                "preemptions": run.metrics.num_preemptions,
            }
            for name, run in runs.items()
        },
    )


def _tpots_s(run: Run) -> list[float]:
    return [line.tpot_s for line in run.timelines if line.tpot_s is not None]


def _ratio(run: Run) -> float:
    tpots = _tpots_s(run)
    return percentile(tpots, 99) / percentile(tpots, 50)


def _share(ample: Run, scarce: Run) -> float:
    """Of the P99, what is not there with ample memory."""
    return 1.0 - percentile(_tpots_s(ample), 99) / percentile(_tpots_s(scarce), 99)


def _differs(ample: Run, scarce: Run, ratio: float, share: float) -> str:
    num_preempted = sum(line.num_preemptions > 0 for line in scarce.timelines)
    part = num_preempted / len(scarce.timelines)
    return sentences(
        [
            f"{scarce.metrics.num_preemptions} preemptions hit {percent(part)} of the requests in scarce memory "
            f"({ample.metrics.num_preemptions} in ample memory).",
            f"The tail is {'shorter' if ratio < _PUBLISHED else 'longer'} than the published {times(_PUBLISHED)}"
            + (
                ": requests enter only when there is room for them to begin, the one that came last gives way, and "
                "what it loses is computed again in chunks beside the others."
                if ratio < _PUBLISHED
                else ": memory is scarcer for these lengths, or recomputation dearer against a decode step."
            ),
            f"The wait has moved to the queue: TTFT P99 is {milliseconds(scarce.metrics.ttft.percentiles[99] / 1e3)}, "
            f"with ample memory {milliseconds(ample.metrics.ttft.percentiles[99] / 1e3)}.",
            f"{percent(share)} of the P99 is gone with ample memory; published are about {percent(_PUBLISHED_SHARE)} "
            "from preemption alone, while this also counts what a fuller batch costs.",
        ]
    )


CLAIM = Claim(
    id="preemption-tail",
    title="Tail latency from preemption",
    published="Under memory pressure P99 time per token is 3.8× P50, and about 70% of it comes from preemption.",
    source="Sun et al., Llumnix (OSDI 2024), its motivation; LLaMA-7B on an A10, vLLM",
    workload="power-law lengths with a mean of 256, Poisson, one GPU with memory for some 13,600 tokens",
    method="The same arrivals at 90% of what scarce memory can serve, in scarce and in ample memory.",
    measure=measure,
    engine="asked",
)
