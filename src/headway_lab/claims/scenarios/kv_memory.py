"""KV memory: in 8 bits, scarce enough to preempt, and shared by prompts that begin alike."""

from __future__ import annotations

from typing import Any

from headway_lab.bench.timelines import percentile
from headway_lab.claims.claim import Chart, Outcome, milliseconds, percent, sentences, times
from headway_lab.claims.context import Claim, Context, Variant, run_alternating
from headway_lab.claims.published_workloads import anyscale, power_law, saturation, shared_prefix
from headway_lab.claims.run import Run

# ---- 8 bits: more requests in the batch, and less to read -----------------------------------------------------------

_KV_TOKENS = 32_768
"""In the 16-bit format; the memory is the bytes that these tokens take."""
_FORMATS = ("fp8", "int8")


def measure_kv_quantisation(context: Context) -> Outcome:
    testbed = context.testbed
    drawn = anyscale(context, context.sized(tiny=20, short=400, full=1000, gpu=600))
    longest = 2_048 // context.divisor
    kv_tokens = _KV_TOKENS // context.divisor
    num_bytes = kv_tokens * testbed.bytes_per_token
    room = {"16 bits": kv_tokens}
    runs = {"16 bits": context.run("16 bits", drawn.at_once(), kv_tokens=kv_tokens, max_model_len=longest)}
    try:
        for kv_dtype in _FORMATS[:1] if testbed.is_cpu or context.is_quick else _FORMATS:
            testbed.use(kv_cache_dtype=kv_dtype)
            room[kv_dtype] = int(num_bytes / testbed.bytes_per_token)
            runs[kv_dtype] = context.run(kv_dtype, drawn.at_once(), kv_tokens=room[kv_dtype], max_model_len=longest)
    finally:
        testbed.use()
    gain = runs["fp8"].output_tok_s / runs["16 bits"].output_tok_s
    fits = room["fp8"] / room["16 bits"]
    return Outcome(
        value=gain,
        unit="× throughput",
        ours=f"{times(fits)} the tokens in the same memory, {times(gain)} the throughput",
        workload=f"{drawn.text}, all at once; KV memory of {num_bytes / 2**20:,.0f} MiB{context.divided}",
        differs=_kv_quantisation_differs(context, runs, fits, gain),
        where=context.where,
        chart=Chart(
            "Throughput where KV memory is scarce, by number format",
            "output tokens per second",
            bars={name: run.output_tok_s for name, run in runs.items()},
            notes={name: f"{room[name]:,} tokens fit, {run.mean_batch:.0f} in the batch" for name, run in runs.items()},
        ),
        numbers={
            name: {
                "tokens that fit": room[name],
                "requests in the batch": run.mean_batch,
                "output tokens/s": run.output_tok_s,
                "preemptions": run.metrics.num_preemptions,
            }
            for name, run in runs.items()
        },
    )


def _kv_quantisation_differs(context: Context, runs: dict[str, Run], fits: float, gain: float) -> str:
    batch = runs["fp8"].mean_batch / runs["16 bits"].mean_batch
    return sentences(
        [
            f"{times(fits)}, not twice: each token and head has a scale.",
            f"The batch grows by {times(batch)}, throughput by {times(gain)}: prompts are computed as before, and a "
            "step with more requests takes somewhat longer.",
            "Simulated as fewer bytes to keep and to read; what converting them costs is not in it."
            if context.where == "simulator"
            else "",
        ]
    )


KV_QUANTISATION = Claim(
    id="kv-quantisation",
    title="KV quantisation's larger batch",
    published="Keys and values in 8 bits fit twice as many tokens, and so twice the batch where memory is the limit.",
    source="KV-cache quantisation in serving engines and guides (2023–2024)",
    workload="memory-bound serving",
    method="The same bytes of KV memory, filled with 16-bit and with 8-bit numbers; requests at once.",
    measure=measure_kv_quantisation,
    engine="gpu",
)


# ---- the tail that preemption makes: the same load in ample and in scarce memory ------------------------------------

_SCARCE_TOKENS = 13_312
_PREEMPTION_LOAD = 0.9
_PREEMPTION_PUBLISHED, _PUBLISHED_SHARE = 3.8, 0.7
_MAX_MODEL_LEN = 6_144
_AMPLE, _SCARCE = "ample memory", "scarce memory"
_CURES: dict[str, dict[str, Any]] = {
    "scarce, 16 seats": {"max_num_seqs": 16},
    "scarce, cheapest victim": {"scheduling_policy": "prefix"},
}
"""Fewer requests at a time; and the victim that loses least (policy `prefix`, whose order is that of arrival here, as
there is no prefix cache)."""


def measure_preemption_tail(context: Context) -> Outcome:
    drawn = power_law(context, context.sized(tiny=30, short=800, full=3000, gpu=1000))
    room = {"kv_tokens": _SCARCE_TOKENS, "max_model_len": _MAX_MODEL_LEN}
    most = {
        name: saturation(context, name, drawn, **room, **options) for name, options in {_SCARCE: {}, **_CURES}.items()
    }
    rate = _PREEMPTION_LOAD * most[_SCARCE]
    work = drawn.at_rate(rate)
    runs = {
        _AMPLE: context.run(_AMPLE, work, max_model_len=_MAX_MODEL_LEN),
        _SCARCE: context.run(_SCARCE, work, **room),
        **{name: context.run(name, work, **room, **options) for name, options in _CURES.items()},
    }
    ample, scarce = runs[_AMPLE], runs[_SCARCE]
    cured = {name: (_ratio(runs[name]), most[name] / most[_SCARCE]) for name in _CURES}
    ratio, share = _ratio(scarce), _share(ample, scarce)
    return Outcome(
        value=ratio,
        unit="× P99/P50",
        ours=f"P99 is {times(ratio)} P50 ({times(_ratio(ample))} without preemption); {percent(share)} of the P99 is "
        "due to scarce memory; cured: "
        + ", ".join(
            f"{_short(name)} {times(after)}, {percent(throughput - 1, signed=True)} throughput"
            for name, (after, throughput) in cured.items()
        ),
        workload=f"{len(work):,} requests, {drawn.text}, Poisson, {rate:.3g}/s; KV memory for {_SCARCE_TOKENS:,} "
        f"tokens against {context.testbed.kv_tokens:,}",
        differs=sentences([_preemption_tail_differs(ample, scarce, ratio, share), _cures(ratio, cured, runs)]),
        where=context.where,
        chart=Chart(
            "Time per output token with and without preemption",
            "milliseconds per token",
            bars={f"{name}, P{p}": 1e3 * percentile(_tpots_s(run), p) for name, run in runs.items() for p in (50, 99)},
            notes={f"{name}, P99": f"{times(_ratio(run))} P50" for name, run in runs.items()},
        ),
        numbers={
            name: {
                "time per token P50, ms": 1e3 * percentile(_tpots_s(run), 50),
                "time per token P99, ms": 1e3 * percentile(_tpots_s(run), 99),
                "P99/P50": _ratio(run),
                "TTFT P99, ms": run.metrics.ttft.percentiles[99],
                "preemptions": run.metrics.num_preemptions,
                **({"most requests/s": most[name]} if name in most else {}),
            }
            for name, run in runs.items()
        },
    )


def _short(name: str) -> str:
    return name.removeprefix("scarce, ")


def _cures(ratio: float, cured: dict[str, tuple[float, float]], runs: dict[str, Run]) -> str:
    """What each cure gives and costs."""
    parts = [
        f"{_short(name)}: {times(after)}, {percent(throughput - 1, signed=True)} of the most that can be served, "
        f"{runs[name].metrics.num_preemptions} preemptions"
        for name, (after, throughput) in cured.items()
    ]
    alarming = 3.0
    side = "above" if ratio > alarming else "below"
    return f"P99/P50 is {side} the {times(alarming)} from which guides blame preemption. Cures: {'; '.join(parts)}."


def _tpots_s(run: Run) -> list[float]:
    return [line.tpot_s for line in run.timelines if line.tpot_s is not None]


def _ratio(run: Run) -> float:
    tpots = _tpots_s(run)
    return percentile(tpots, 99) / percentile(tpots, 50)


def _share(ample: Run, scarce: Run) -> float:
    """The share of the P99 that is not there with ample memory."""
    return 1.0 - percentile(_tpots_s(ample), 99) / percentile(_tpots_s(scarce), 99)


def _preemption_tail_differs(ample: Run, scarce: Run, ratio: float, share: float) -> str:
    num_preempted = sum(line.num_preemptions > 0 for line in scarce.timelines)
    part = num_preempted / len(scarce.timelines)
    return sentences(
        [
            f"{scarce.metrics.num_preemptions} preemptions hit {percent(part)} of the requests in scarce memory "
            f"({ample.metrics.num_preemptions} in ample memory).",
            f"The tail is {'shorter' if ratio < _PREEMPTION_PUBLISHED else 'longer'} than the published "
            f"{times(_PREEMPTION_PUBLISHED)}"
            + (
                ": requests enter only when there is room for them to begin, the one that came last gives way, and "
                "what it loses is computed again in chunks beside the others."
                if ratio < _PREEMPTION_PUBLISHED
                else ": memory is scarcer for these lengths, or recomputation dearer against a decode step."
            ),
            f"The wait has moved to the queue: TTFT P99 is {milliseconds(scarce.metrics.ttft.percentiles[99] / 1e3)}, "
            f"with ample memory {milliseconds(ample.metrics.ttft.percentiles[99] / 1e3)}.",
            f"{percent(share)} of the P99 is gone with ample memory; published are about {percent(_PUBLISHED_SHARE)} "
            "from preemption alone, while this also counts what a fuller batch costs.",
        ]
    )


PREEMPTION_TAIL = Claim(
    id="preemption-tail",
    title="Tail latency from preemption",
    published="Under memory pressure P99 time per token is 3.8× P50, and about 70% of it comes from preemption; "
    "above 3× a smaller batch or a choice of victims helps.",
    source="Sun et al., Llumnix (OSDI 2024), its motivation; LLaMA-7B on an A10, vLLM",
    workload="power-law lengths with a mean of 256, Poisson, one GPU with memory for some 13,600 tokens",
    method="The same arrivals at 90% of what scarce memory can serve, in scarce and in ample memory, and with two "
    "cures.",
    measure=measure_preemption_tail,
    engine="asked",
)


# ---- prompts that begin alike ---------------------------------------------------------------------------------------

_PREFIX, _TAIL, _OUT = 4_096, 64, 64
_SHARING_PUBLISHED = 6.4
_OFF, _ON = "prefix cache off", "prefix cache on"
_STATES = {_OFF: False, _ON: True}


def measure_prefix_sharing(context: Context) -> Outcome:
    part = context.divisor
    count = context.sized(tiny=8, short=64, full=64)
    prefix, tail, out = _PREFIX // part, _TAIL // part, _OUT // part
    drawn = shared_prefix(context, count, prefix=prefix, tail=tail, out=out)
    turns = run_alternating(
        context, {name: Variant(drawn.at_once(), {"enable_prefix_caching": state}) for name, state in _STATES.items()}
    )
    runs = turns.best
    off, on = runs.values()
    gain = on.output_tok_s / off.output_tok_s
    return Outcome(
        value=gain,
        unit="× without",
        ours=f"{times(gain)} the output tokens per second",
        workload=f"{drawn.text}{context.divided}",
        differs=sentences(
            [_prefix_sharing_differs(off, on, gain, count=count, prefix=prefix, tail=tail), turns.spread(_ON, _OFF)]
        ),
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


def _prefix_sharing_differs(off: Run, on: Run, gain: float, *, count: int, prefix: int, tail: int) -> str:
    computed = count * (prefix + tail) / (prefix + count * tail)
    return sentences(
        [
            f"With the cache {times(computed)} fewer prompt tokens are computed; the time falls by {times(gain)}, "
            "since what is left is generating, which the cache does not shorten.",
            f"{times(_SHARING_PUBLISHED)} is the best of several published workloads, which share less or more than "
            "this one; the longer the common part against the rest, the larger the gain.",
            f"Half of the requests had their first token after {milliseconds(on.metrics.ttft.percentiles[50] / 1e3)} "
            f"instead of {milliseconds(off.metrics.ttft.percentiles[50] / 1e3)}.",
        ]
    )


PREFIX_SHARING = Claim(
    id="prefix-sharing",
    title="Sharing prefixes",
    published="Reusing the KV blocks of common prefixes gives up to 6.4× the throughput (5–10× by other accounts).",
    source="Zheng et al., SGLang / RadixAttention (2023)",
    workload="prompts with a long common part: few-shot examples, agents, documents",
    method="The same requests at once, 4,096 common and 64 own tokens in, 64 out, with the prefix cache off and on.",
    measure=measure_prefix_sharing,
    engine="always",
)
