"""Paging: the larger batch that fits in the same memory."""

from __future__ import annotations

from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.scenarios.era_runs import CHUNKED, PAGED, RESERVED, EraRuns, era_runs
from headway.lab.claims.words import sentences, times


def measure(context: Context) -> Outcome:
    eras = era_runs(context)
    gain = eras.ratio(PAGED, RESERVED)
    batch = eras.runs[PAGED].mean_batch / eras.runs[RESERVED].mean_batch
    shown = (RESERVED, PAGED, CHUNKED)
    return Outcome(
        value=gain,
        unit="× reserved",
        ours=f"{times(gain)} the throughput with {times(batch)} the batch",
        workload=eras.workload,
        differs=_differs(eras, gain, batch),
        where=context.where,
        chart=Chart(
            "Requests in the batch, in the same KV memory",
            "requests in the batch, mean over steps",
            bars={mode: eras.runs[mode].mean_batch for mode in shown},
            notes={mode: f"{times(eras.ratio(mode, RESERVED))} the throughput" for mode in shown},
        ),
        numbers={mode: eras.numbers[mode] for mode in shown},
    )


def _differs(eras: EraRuns, gain: float, batch: float) -> str:
    room = eras.kv_tokens / eras.max_model_len
    return sentences(
        [
            f"Reserved memory has room for {room:.0f} requests; paged, {eras.runs[PAGED].mean_batch:.1f} ran at once.",
            eras.turns.spread(PAGED, RESERVED),
            f"{times(batch)} the batch gives {times(gain)} the throughput: "
            + (
                "nearly all of it, as where a step takes as long whatever is in it."
                if gain > 0.8 * batch
                else "a step with more requests takes longer, and the prompts, which are computed either way, do not "
                "gain from a larger batch."
            ),
        ]
    )


CLAIM = Claim(
    id="paging",
    title="Paging's larger batch",
    published="Paged KV memory gives 2–4× the throughput at the same latency, by larger batches in the same memory.",
    source="Kwon et al., PagedAttention / vLLM (SOSP 2023); against Orca with reserved memory",
    workload="ShareGPT and Alpaca lengths, Poisson",
    method="Continuous batching with whole prompts, memory reserved for 2,048 tokens a request or paged; same memory.",
    measure=measure,
    engine="always",
)
