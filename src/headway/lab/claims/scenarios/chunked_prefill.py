"""Chunked prefill on a mix of short and long prompts."""

from __future__ import annotations

from headway.lab.bench.timelines import percentile
from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.load_search import saturation
from headway.lab.claims.place import Run
from headway.lab.claims.words import change, milliseconds, percent, sentences, times
from headway.lab.claims.works import Drawn, mixed

_MODES = ("prefill-first", "decode-first", "chunked")
_LOAD = 0.75


def measure(context: Context) -> Outcome:
    drawn = mixed(context, context.sized(tiny=24, short=800, full=2000, gpu=300))
    rate = _LOAD * saturation(context, "chunked", drawn)
    runs = {mode: context.run(mode, drawn.at_rate(rate), prefill_mode=mode) for mode in _MODES}
    ttft = {mode: run.metrics.ttft.percentiles[95] for mode, run in runs.items()}
    gaps = {mode: run.metrics.itl.percentiles[99] for mode, run in runs.items()}
    against_decode, against_whole = (
        ttft["decode-first"] / ttft["chunked"],
        change(ttft["chunked"], ttft["prefill-first"]),
    )
    gap_gain = gaps["prefill-first"] / gaps["chunked"]
    return Outcome(
        value=100 * against_whole,
        unit="% TTFT P95",
        ours=f"against prefill-first TTFT P95 {percent(against_whole, signed=True)}, P99 between tokens "
        f"{times(gap_gain)} shorter; against decode-first TTFT P95 {times(against_decode)} shorter",
        workload=f"{len(drawn.work):,} requests, {drawn.text}; Poisson, {rate:.3g}/s, {_LOAD:.0%} of what can be served"
        f"{context.divided}",
        differs=_differs(drawn, runs, against_decode, against_whole, gap_gain),
        where=context.where,
        chart=Chart(
            "Longest waits by how prompts are computed",
            "milliseconds",
            bars={f"{mode}: {name}": values[mode] for name, values in _shown(ttft, gaps).items() for mode in _MODES},
            log_y=True,
        ),
        numbers={
            mode: {
                "TTFT P50, ms": run.metrics.ttft.percentiles[50],
                "TTFT P95, ms": ttft[mode],
                "TTFT P99, ms": run.metrics.ttft.percentiles[99],
                "TTFT P95 of short prompts, ms": 1e3 * _short_ttft_s(drawn, run),
                "between tokens P99, ms": gaps[mode],
                "output tokens/s": run.output_tok_s,
            }
            for mode, run in runs.items()
        },
    )


def _shown(ttft: dict[str, float], gaps: dict[str, float]) -> dict[str, dict[str, float]]:
    return {"TTFT P95": ttft, "between tokens P99": gaps}


def _short_ttft_s(drawn: Drawn, run: Run) -> float:
    """P95 of the requests that are not documents."""
    lengths = sorted(one.num_prompt_tokens for one in drawn.work)
    limit = lengths[int(0.85 * len(lengths))]
    return percentile([line.ttft_s for line in run.timelines if line.num_prompt_tokens <= limit], 95)


def _differs(drawn: Drawn, runs: dict[str, Run], against_decode: float, against_whole: float, gap_gain: float) -> str:
    short = {mode: milliseconds(_short_ttft_s(drawn, run)) for mode, run in runs.items()}
    return sentences(
        [
            "It depends on what it is compared with. Whoever lets generating requests finish first makes prompts wait "
            f"for them: there chunks make TTFT P95 {times(against_decode)} shorter, at a load that decode-first serves "
            f"with {runs['decode-first'].output_tok_s:,.0f} tokens/s and chunks with "
            f"{runs['chunked'].output_tok_s:,.0f}.",
            "Whoever computes whole prompts first has first tokens early and pays with gaps between tokens: there "
            f"chunks change TTFT P95 by {percent(against_whole, signed=True)} and make the P99 gap {times(gap_gain)} "
            "shorter.",
            f"Short prompts alone had a TTFT P95 of {short['chunked']} with chunks, "
            f"{short['prefill-first']} prefill-first, {short['decode-first']} decode-first.",
        ]
    )


CLAIM = Claim(
    id="chunked-prefill",
    title="Chunked prefill on mixed loads",
    published="Chunked prefill lowers TTFT P95 by 50–70% on mixed loads, and P99 TTFT and time between tokens with it.",
    source="Agrawal et al., Sarathi-Serve (OSDI 2024), and guides that followed",
    workload="short chats and long documents together",
    method="One load at 75% of what can be served; prompts whole before, whole after, or in chunks beside decoding.",
    measure=measure,
    engine="gpu",
)
