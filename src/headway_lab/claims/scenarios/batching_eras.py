"""From static batching to paged, chunked continuous batching: throughput, KV memory that is wasted, the larger batch.

Three claims are about the same runs. Memory is what the published comparison had: OPT-13B on a 40 GB GPU leaves room
for the keys and values of some 12,000 tokens. Reserved memory is for the longest possible request, 2,048 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headway_lab.claims.claim import Chart, Outcome, milliseconds, percent, sentences, times
from headway_lab.claims.context import AlternatingRuns, Claim, Context, Variant, run_alternating
from headway_lab.claims.published_workloads import AZURE, CHAT_MAX_INPUT, CHAT_MAX_OUTPUT, anyscale, chat
from headway_lab.claims.run import Run
from headway_lab.workload.bench_requests import BenchRequest

# ---- the runs of several claims -------------------------------------------------------------------------------------

KV_TOKENS = 12_288
MAX_MODEL_LEN = 2_048

STATIC = "static, reserved"
RESERVED = "continuous, reserved"
PAGED = "continuous, paged"
CHUNKED = "continuous, paged, chunked"

MODES: dict[str, dict[str, Any]] = {
    STATIC: {"batching": "static", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    RESERVED: {"kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    PAGED: {"prefill_mode": "prefill-first"},
    CHUNKED: {"prefill_mode": "chunked"},
}


@dataclass(frozen=True)
class EraRuns:
    """The runs of each mode."""

    turns: AlternatingRuns
    work: Sequence[BenchRequest]
    workload: str
    kv_tokens: int
    max_model_len: int

    @cached_property
    def runs(self) -> dict[str, Run]:
        """The fastest round of each mode."""
        return self.turns.best

    def ratio(self, mode: str, base: str = STATIC) -> float:
        """The throughput of a mode over that of another."""
        return self.runs[mode].total_tok_s / self.runs[base].total_tok_s

    @property
    def numbers(self) -> dict[str, dict[str, float]]:
        return {
            mode: {
                "tokens/s": run.total_tok_s,
                "to static": self.ratio(mode),
                "requests in the batch": run.mean_batch,
                "KV memory wasted, %": 100 * run.mean_waste,
            }
            for mode, run in self.runs.items()
        }


def era_runs(context: Context) -> EraRuns:
    """The runs that several claims need, measured once."""
    return context.once("eras", lambda: _measure_era_runs(context))


def _measure_era_runs(context: Context) -> EraRuns:
    kv_tokens, max_model_len = KV_TOKENS // context.divisor, MAX_MODEL_LEN // context.divisor
    drawn = anyscale(context, context.sized(tiny=20, short=300, full=1000, gpu=300))
    work = drawn.at_once()
    room = {"kv_tokens": kv_tokens, "max_model_len": max_model_len}
    turns = run_alternating(context, {mode: Variant(work, {**room, **options}) for mode, options in MODES.items()})
    workload = (
        f"{drawn.text}, all at once; KV memory for {kv_tokens:,} tokens, requests of up to {max_model_len:,}"
        f"{context.divided}"
    )
    return EraRuns(turns, work, workload, kv_tokens, max_model_len)


# ---- static against continuous batching -----------------------------------------------------------------------------

_CONTINUOUS, _PAGED, _KERNELS = 8.0, 23.0, 4.0


def measure_eras(context: Context) -> Outcome:
    eras = era_runs(context)
    reserved, paged = eras.ratio(RESERVED), eras.ratio(CHUNKED)
    return Outcome(
        value=paged,
        unit="× static",
        ours=f"{times(reserved)} continuous, {times(paged)} with paging and chunked prefill",
        workload=eras.workload,
        differs=_eras_differs(eras, reserved, paged),
        where=context.where,
        chart=Chart(
            "Throughput of the same requests in the same KV memory",
            "prompt and output tokens per second",
            bars={mode: run.total_tok_s for mode, run in eras.runs.items()},
            notes={mode: f"{times(eras.ratio(mode))} static" for mode in eras.runs},
        ),
        numbers=eras.numbers,
    )


def _eras_differs(eras: EraRuns, reserved: float, paged: float) -> str:
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


ERAS = Claim(
    id="eras",
    title="Static to continuous batching",
    published="Continuous batching gives 8× the throughput of static batching, 23× with paged KV memory; else 3–8×.",
    source="Anyscale, How continuous batching enables 23x throughput (2023); OPT-13B, A100 40 GB",
    workload="1,000 prompts of 512 tokens at once, answers exponential with mean 128, up to 1,536",
    method="One engine, one KV memory (12,288 tokens, about what OPT-13B leaves on 40 GB), four ways to use it.",
    measure=measure_eras,
    engine="always",
)


# ---- the larger batch that fits in the same memory ------------------------------------------------------------------


def measure_paging(context: Context) -> Outcome:
    eras = era_runs(context)
    gain = eras.ratio(PAGED, RESERVED)
    batch = eras.runs[PAGED].mean_batch / eras.runs[RESERVED].mean_batch
    shown = (RESERVED, PAGED, CHUNKED)
    return Outcome(
        value=gain,
        unit="× reserved",
        ours=f"{times(gain)} the throughput with {times(batch)} the batch",
        workload=eras.workload,
        differs=_paging_differs(eras, gain, batch),
        where=context.where,
        chart=Chart(
            "Requests in the batch, in the same KV memory",
            "requests in the batch, mean over steps",
            bars={mode: eras.runs[mode].mean_batch for mode in shown},
            notes={mode: f"{times(eras.ratio(mode, RESERVED))} the throughput" for mode in shown},
        ),
        numbers={mode: eras.numbers[mode] for mode in shown},
    )


def _paging_differs(eras: EraRuns, gain: float, batch: float) -> str:
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


PAGING = Claim(
    id="paging",
    title="Paging's larger batch",
    published="Paged KV memory gives 2–4× the throughput at the same latency, by larger batches in the same memory.",
    source="Kwon et al., PagedAttention / vLLM (SOSP 2023); against Orca with reserved memory",
    workload="ShareGPT and Alpaca lengths, Poisson",
    method="Continuous batching with whole prompts, memory reserved for 2,048 tokens a request or paged; same memory.",
    measure=measure_paging,
    engine="always",
)


# ---- KV memory that is kept and holds nothing -----------------------------------------------------------------------

_SMALL = "paged, chunked, blocks of 16"


def measure_kv_waste(context: Context) -> Outcome:
    runs, workload = _kv_waste_runs(context)
    before, after = runs[STATIC].mean_waste, runs[CHUNKED].mean_waste
    small = f", {percent(runs[_SMALL].mean_waste)} in blocks of 16" if _SMALL in runs else ""
    return Outcome(
        value=100 * after,
        unit="% wasted",
        ours=f"{percent(before)} reserved, {percent(after)} paged in blocks of {context.testbed.block_size}{small}",
        workload=workload,
        differs=_kv_waste_differs(before, after, context.testbed.block_size),
        where=context.where,
        chart=Chart(
            "KV memory kept for requests that holds no token",
            "% of the memory that is kept, mean over steps",
            bars={mode: 100 * run.mean_waste for mode, run in runs.items()},
        ),
        numbers={
            mode: {"wasted, %": 100 * run.mean_waste, "requests in the batch": run.mean_batch}
            for mode, run in runs.items()
        },
    )


def _kv_waste_runs(context: Context) -> tuple[dict[str, Run], str]:
    """Runs on recorded lengths if these are given; otherwise on the work of the claim about batching eras."""
    if context.data_file(AZURE) is None or context.divisor > 1:
        eras = era_runs(context)
        runs, work, workload = dict(eras.runs), eras.work, eras.workload
        room = {"kv_tokens": eras.kv_tokens, "max_model_len": eras.max_model_len}
    else:
        drawn = chat(context, context.sized(tiny=100, short=300, full=1000, gpu=150))
        work, room = drawn.at_once(), {"kv_tokens": 131_072, "max_model_len": CHAT_MAX_INPUT + CHAT_MAX_OUTPUT}
        runs = {mode: context.run(mode, work, **room, **MODES[mode]) for mode in (STATIC, RESERVED, CHUNKED)}
        workload = f"{len(work):,} requests at once, {drawn.text}; KV memory for {room['kv_tokens']:,} tokens"
    if context.where == "simulator" and context.testbed.block_size > 16:
        runs[_SMALL] = context.run(_SMALL, work, **room, **MODES[CHUNKED], block_size=16)
    return runs, workload


def _kv_waste_differs(before: float, after: float, block_size: int) -> str:
    place = "within" if 0.6 <= before <= 0.8 else "above" if before > 0.8 else "below"
    return sentences(
        [
            f"{percent(before)} is {place} the published range: it follows from how much longer the longest request "
            "may be than the mean one is.",
            f"Of paged memory {percent(after)} is empty, on average half of each request's last block of {block_size} "
            "tokens" + ("." if after < 0.04 else ": more than published, where blocks have 16 tokens."),
        ]
    )


KV_WASTE = Claim(
    id="kv-waste",
    title="Waste of KV memory",
    published="60–80% of KV memory is wasted where it is reserved for the longest request; paging leaves under 4%.",
    source="Kwon et al., PagedAttention / vLLM (SOSP 2023)",
    workload="ShareGPT and Alpaca lengths, OPT and LLaMA models",
    method="At every step, the part of the memory kept for requests that holds no token; the mean over steps.",
    measure=measure_kv_waste,
    engine="gpu",
)
