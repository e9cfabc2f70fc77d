"""KV memory in 8 bits: more requests in the batch, and less to read."""

from __future__ import annotations

from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.place import Run
from headway.lab.claims.words import sentences, times
from headway.lab.claims.works import anyscale

_KV_TOKENS = 32_768
"""In the format before; the bytes that these take are what there is."""
_FORMATS = ("fp8", "int8")


def measure(context: Context) -> Outcome:
    place = context.place
    drawn = anyscale(context, context.sized(tiny=20, short=400, full=1000, gpu=600))
    longest = 2_048 // context.divisor
    kv_tokens = _KV_TOKENS // context.divisor
    num_bytes = kv_tokens * place.bytes_per_token
    room = {"16 bits": kv_tokens}
    runs = {"16 bits": context.run("16 bits", drawn.at_once(), kv_tokens=kv_tokens, max_model_len=longest)}
    try:
        for kv_dtype in _FORMATS[:1] if place.is_cpu or context.is_quick else _FORMATS:
            place.use_kv_dtype(kv_dtype)
            room[kv_dtype] = int(num_bytes / place.bytes_per_token)
            runs[kv_dtype] = context.run(kv_dtype, drawn.at_once(), kv_tokens=room[kv_dtype], max_model_len=longest)
    finally:
        place.use_kv_dtype(None)
    gain = runs["fp8"].output_tok_s / runs["16 bits"].output_tok_s
    fits = room["fp8"] / room["16 bits"]
    return Outcome(
        value=gain,
        unit="× throughput",
        ours=f"{times(fits)} the tokens in the same memory, {times(gain)} the throughput",
        workload=f"{drawn.text}, all at once; KV memory of {num_bytes / 2**20:,.0f} MiB{context.divided}",
        differs=_differs(context, runs, fits, gain),
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


def _differs(context: Context, runs: dict[str, Run], fits: float, gain: float) -> str:
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


CLAIM = Claim(
    id="kv-quantisation",
    title="KV quantisation's larger batch",
    published="Keys and values in 8 bits fit twice as many tokens, and so twice the batch where memory is the limit.",
    source="KV-cache quantisation in serving engines and guides (2023–2024)",
    workload="memory-bound serving",
    method="The same bytes of KV memory, filled with 16-bit and with 8-bit numbers; requests at once.",
    measure=measure,
    engine="gpu",
)
