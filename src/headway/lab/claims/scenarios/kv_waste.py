"""KV memory that is kept from others and holds nothing."""

from __future__ import annotations

from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.place import Run
from headway.lab.claims.scenarios.era_runs import CHUNKED, MODES, RESERVED, STATIC, era_runs
from headway.lab.claims.words import percent, sentences
from headway.lab.claims.works import AZURE, CHAT_MAX_INPUT, CHAT_MAX_OUTPUT, chat

_SMALL = "paged, chunked, blocks of 16"


def measure(context: Context) -> Outcome:
    runs, workload = _runs(context)
    before, after = runs[STATIC].mean_waste, runs[CHUNKED].mean_waste
    small = f", {percent(runs[_SMALL].mean_waste)} in blocks of 16" if _SMALL in runs else ""
    return Outcome(
        value=100 * after,
        unit="% wasted",
        ours=f"{percent(before)} reserved, {percent(after)} paged in blocks of {context.place.block_size}{small}",
        workload=workload,
        differs=_differs(before, after, context.place.block_size),
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


def _runs(context: Context) -> tuple[dict[str, Run], str]:
    """On recorded lengths where they are given; otherwise on the work of the claim about batching eras."""
    if context.data_file(AZURE) is None or context.divisor > 1:
        eras = era_runs(context)
        runs, work, workload = dict(eras.runs), eras.work, eras.workload
        room = {"kv_tokens": eras.kv_tokens, "max_model_len": eras.max_model_len}
    else:
        drawn = chat(context, context.sized(tiny=100, short=300, full=1000, gpu=150))
        work, room = drawn.at_once(), {"kv_tokens": 131_072, "max_model_len": CHAT_MAX_INPUT + CHAT_MAX_OUTPUT}
        runs = {mode: context.run(mode, work, **room, **MODES[mode]) for mode in (STATIC, RESERVED, CHUNKED)}
        workload = f"{len(work):,} requests at once, {drawn.text}; KV memory for {room['kv_tokens']:,} tokens"
    if context.where == "simulator" and context.place.block_size > 16:
        runs[_SMALL] = context.run(_SMALL, work, **room, **MODES[CHUNKED], block_size=16)
    return runs, workload


def _differs(before: float, after: float, block_size: int) -> str:
    place = "within" if 0.6 <= before <= 0.8 else "above" if before > 0.8 else "below"
    return sentences(
        [
            f"{percent(before)} is {place} the published range: it follows from how much longer the longest request "
            "may be than the mean one is.",
            f"Of paged memory {percent(after)} is empty, on average half of each request's last block of {block_size} "
            "tokens" + ("." if after < 0.04 else ": more than published, where blocks have 16 tokens."),
        ]
    )


CLAIM = Claim(
    id="kv-waste",
    title="Waste of KV memory",
    published="60–80% of KV memory is wasted where it is reserved for the longest request; paging leaves under 4%.",
    source="Kwon et al., PagedAttention / vLLM (SOSP 2023)",
    workload="ShareGPT and Alpaca lengths, OPT and LLaMA models",
    method="At every step, the part of the memory kept for requests that holds no token; the mean over steps.",
    measure=measure,
    engine="gpu",
)
