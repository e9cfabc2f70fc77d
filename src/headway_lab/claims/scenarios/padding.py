"""Static batches as frameworks compute them, padded to rectangles, beside sealed batches without padding and continuous
batching: what is computed for nothing, and how many slots of the batch give a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway_lab.claims.claim import Chart, Line, Outcome, percent, sentences, times
from headway_lab.claims.context import AlternatingRuns, Claim, Context, Variant, run_alternating
from headway_lab.claims.machine_shares import MachineShares, machine_shares
from headway_lab.claims.published_workloads import equal, spread_answers
from headway_lab.claims.rectangular import Usage, rectangular
from headway_lab.claims.testbed import EngineTestbed
from headway_lab.workload.bench_requests import BenchRequest

RECTANGULAR, SEALED, CONTINUOUS = "rectangular", "sealed, no padding", "continuous"
SEALING: Mapping[str, Any] = {"batching": "static", "prefill_mode": "prefill-first"}

_SIZES = (8, 16, 32, 64)
"""Batch limits in the simulator."""
_SIZE, _CPU_QUICK_SIZE = 16, 8
"""The batch limit of the numbers in the table and of the published example; of a quick run on a CPU."""
_MANY, _FEW = 2_000, 50
_PUBLISHED_WASTE = (0.6, 0.8)
_PUBLISHED_BUSY = (0.4, 0.75)
"""At most under static batching; at least under continuous batching."""


@dataclass(frozen=True)
class Ways:
    """One workload at one batch limit, in each way."""

    turns: AlternatingRuns
    usage: Mapping[str, Usage]

    @property
    def gains(self) -> dict[str, float]:
        """Throughput over that of rectangular batches."""
        return {way: used.tok_s / self.usage[RECTANGULAR].tok_s for way, used in self.usage.items()}


def ways_of(context: Context, work: list[BenchRequest], size: int) -> Ways:
    """Serve the work, all at once, in batches of at most `size` requests: in rectangles, sealed, and continuously."""
    sealing = {**SEALING, "max_num_seqs": size}
    turns = run_alternating(
        context,
        {
            RECTANGULAR: Variant(rectangular(work, size), sealing),
            SEALED: Variant(work, sealing),
            CONTINUOUS: Variant(work, {"max_num_seqs": size}),
        },
    )
    return Ways(turns, {way: Usage.of(run, work, size) for way, run in turns.best.items()})


def measure_padding(context: Context) -> Outcome:
    drawn = spread_answers(context, context.sized(tiny=40, short=400, full=1000))
    work = drawn.at_once()
    size = context.sized(tiny=_CPU_QUICK_SIZE, short=_SIZE, full=_SIZE)
    sizes = _SIZES if context.where == "simulator" else (size,)
    by_size = {one: ways_of(context, work, one) for one in sizes}
    ways = by_size[size]
    usage = ways.usage
    shares = _shares(context, ways, work)
    return Outcome(
        value=100 * usage[RECTANGULAR].waste,
        unit="% padding",
        ours=f"{percent(usage[RECTANGULAR].waste)} of the rows of rectangular batches are padding; "
        f"{percent(usage[SEALED].busy)} of the slots give a token when batches are sealed, "
        f"{percent(usage[CONTINUOUS].busy)} when continuous; throughput {times(ways.gains[SEALED])} without padding, "
        f"{times(ways.gains[CONTINUOUS])} continuous",
        workload=f"{drawn.text}, all at once; at most {size} at a time{context.divided}",
        differs=_differs(work, ways, shares, size),
        where=context.where,
        chart=_chart(by_size),
        numbers={**_numbers(ways, shares), **_examples(context)},
    )


def _shares(context: Context, ways: Ways, work: list[BenchRequest]) -> dict[str, MachineShares]:
    """Shares of the machine's ceilings, by way. Empty in the simulator, which knows none, and where the engine is
    faster than the ceiling of arithmetic, since it multiplies integers there."""
    testbed = context.testbed
    if not isinstance(testbed, EngineTestbed):
        return {}
    engine, ceilings = testbed.engine(), testbed.ceilings
    shares = {way: machine_shares(run, work, engine, ceilings) for way, run in ways.turns.best.items()}
    return shares if all(share.compute <= 1 for share in shares.values()) else {}


def _numbers(ways: Ways, shares: Mapping[str, MachineShares]) -> dict[str, dict[str, float]]:
    return {
        way: {
            "padding, % of computed rows": 100 * used.waste,
            "before prompts, %": 100 * used.num_filler_rows / used.num_rows,
            "behind answers, %": 100 * used.num_late_rows / used.num_rows,
            "slots that give a token, %": 100 * used.busy,
            "output tokens/s": used.tok_s,
            "to rectangular": ways.gains[way],
        }
        | (
            {
                "arithmetic used, %": 100 * shares[way].compute,
                "without padding, %": 100 * shares[way].useful_compute,
                "bandwidth used, %": 100 * shares[way].bandwidth,
            }
            if shares
            else {}
        )
        for way, used in ways.usage.items()
    }


def _examples(context: Context) -> dict[str, dict[str, float]]:
    """The published examples: one sealed batch with one long answer. Each is served and its slots are counted."""
    part = context.divisor
    rows = {}
    for long, short in ((512 // part, 64 // part), (_MANY // part, _FEW // part)):
        [first, *others] = equal(context, _SIZE, num_in=64 // part, num_out=short).at_once()
        work = [dataclasses.replace(first, num_output_tokens=long), *others]
        name = f"a batch of {_SIZE}: one answer of {long:,}, {_SIZE - 1} of {short}"
        used = Usage.of(context.run(name, work, **SEALING, max_num_seqs=_SIZE), work, _SIZE)
        rows[name] = {"slots that give a token, %": 100 * used.busy, "idle slots, all steps": used.num_idle}
    return rows


def _chart(by_size: Mapping[int, Ways]) -> Chart:
    title, y = "How full the batch is", "%, mean over steps"
    shares = {
        "continuous: slots that give a token": lambda ways: ways.usage[CONTINUOUS].busy,
        "sealed: slots that give a token": lambda ways: ways.usage[SEALED].busy,
        "rectangular: computed rows that are no padding": lambda ways: 1 - ways.usage[RECTANGULAR].waste,
    }
    if len(by_size) == 1:
        [ways] = by_size.values()
        notes = [f"{times(ways.gains[way])} the throughput" for way in (CONTINUOUS, SEALED, RECTANGULAR)]
        bars = {name: 100 * share(ways) for name, share in shares.items()}
        return Chart(title, y, bars=bars, notes=dict(zip(bars, notes)))
    lines = [
        Line(name, list(by_size), [100 * share(ways) for ways in by_size.values()]) for name, share in shares.items()
    ]
    most, least = (100 * share for share in _PUBLISHED_BUSY)
    return Chart(
        title,
        y,
        lines=tuple(lines),
        x="requests in the batch, at most",
        log_x=True,
        levels={f"published, continuous: {least:.0f}% or more": least, f"published, static: {most:.0f}% or less": most},
    )


def _differs(work: list[BenchRequest], ways: Ways, shares: Mapping[str, MachineShares], size: int) -> str:
    usage, (low, high) = ways.usage, _PUBLISHED_WASTE
    waste = usage[RECTANGULAR].waste
    place = "within" if low <= waste <= high else "above" if waste > high else "below"
    rows = usage[RECTANGULAR].num_rows
    lengths = [one.num_output_tokens for one in work]
    batch_s = {way: used.duration_s for way, used in usage.items()}
    return sentences(
        [
            f"Counted are rows, the tokens that a step computes: {percent(waste)} is {place} the published 60–80%, "
            f"{percent(usage[RECTANGULAR].num_filler_rows / rows)} before prompts and "
            f"{percent(usage[RECTANGULAR].num_late_rows / rows)} behind answers. It follows from how much longer the "
            f"longest of {size} is than the mean one: answers have {min(lengths)} to {max(lengths)} tokens.",
            "A busy slot is one whose step gives a token that was asked for; the first and last steps, in which a "
            "batch fills and drains, count too.",
            f"Without padding a sealed batch leaves as many slots idle, but the idle ones compute nothing: the same "
            f"requests take {percent(batch_s[SEALED] / batch_s[RECTANGULAR])} of the time, and continuous batching "
            f"takes {percent(batch_s[CONTINUOUS] / batch_s[RECTANGULAR])}.",
            "Fewer rows save less time than their share: a step whose slots are idle reads all weights still."
            if batch_s[SEALED] / batch_s[RECTANGULAR] > 1.3 * (1 - waste)
            else "",
            f"Of the arithmetic that this machine can do, {percent(shares[RECTANGULAR].useful_compute)} goes into "
            f"tokens that were asked for when batches are rectangular, {percent(shares[CONTINUOUS].useful_compute)} "
            "when continuous."
            if shares
            else "",
            ways.turns.spread_of_times(CONTINUOUS, RECTANGULAR),
        ]
    )


PADDING = Claim(
    id="padding",
    title="Padding and idle slots",
    published="Rectangular batches waste 60–80% on padding; utilisation is 20–40% static, 75–90% continuous. One "
    "answer of 512 tokens among 64s leaves 15 slots idle for 448 steps.",
    source="Articles on continuous batching, without a single origin; 60% of an H100 idle, below 50% in use",
    workload="answers of 10 to 500 tokens with a mean of 100; batches of 16",
    method="Batches padded to their longest prompt and answer, sealed ones without padding, and continuous batching.",
    measure=measure_padding,
    engine="always",
)
