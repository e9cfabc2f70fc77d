"""The gain map: what continuous batching is worth over sealed batches, by what the work is like.

Answers always have the same mean length, and spread ever wider around it. In each grid one more thing changes: the
limit of the batch, the share of prompts in the tokens, or the load.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway_lab.charts import HeatGrid, HeatMap
from headway_lab.claims.claim import Chart, Outcome, percent, sentences, times
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.spread_cells import CONTINUOUS, DYNAMIC, STATIC, Cell, Cells, Sizes, jobs_of

# ---- the map --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The cells of the map."""

    spreads: Sequence[float]
    batches: Sequence[int]
    prompt_shares: Sequence[float]
    loads: Sequence[float]
    batch: int
    """The limit of the batch, and the share of prompts, where these do not change."""
    prompt_share: float
    mean: int
    longest: int
    sizes: Sizes

    def cell(self, spread: float, **others: Any) -> Cell:
        usual = {"batch": self.batch, "prompt_share": self.prompt_share, "mean": self.mean, "longest": self.longest}
        return Cell(spread, **{**usual, **others})


FULL = Plan(
    spreads=(1, 3, 10, 30, 100, 300),
    batches=(8, 32, 64, 128, 256),
    prompt_shares=(0.02, 0.2, 0.5, 0.8, 0.95),
    loads=(0.25, 0.5, 0.75),
    batch=64,
    prompt_share=0.2,
    mean=50,
    longest=2_048,
    sizes=Sizes(batches=6, least=128, arrivals=384),
)
QUICK = replace(
    FULL,
    spreads=(1, 10, 100),
    batches=(8, 32, 128),
    prompt_shares=(0.02, 0.2, 0.5, 0.8),
    loads=(0.25, 0.75),
    batch=32,
    sizes=Sizes(batches=5, least=96, arrivals=192),
)
TINY = replace(QUICK, spreads=(1, 30), batches=(4, 16), prompt_shares=(0.2, 0.8), loads=(0.5,), batch=16)
"""The map of a machine that is as slow as a CPU."""

BOUNDS = (1.5, 3.0, 8.0, 20.0)
"""The gains that were published."""
_SPREAD = "spread of answers: P99 of their lengths ÷ median"
_BATCHES = "requests in a batch, at most"


def measure_gain_map(context: Context) -> Outcome:
    plan = _plan(context)
    return _measure_engine(context, plan) if context.where == "engine" else _measure_map(context, plan)


def _plan(context: Context) -> Plan:
    if not context.testbed.is_cpu:
        return QUICK if context.is_quick else FULL
    part = context.divisor
    sizes = Sizes(batches=4 if context.is_quick else 6, least=32, arrivals=32)
    return replace(TINY, mean=64 // part, longest=2_048 // part, sizes=sizes)


def _measure_map(context: Context, plan: Plan) -> Outcome:
    shown, again = _shown_grids(plan), _again(plan)
    chosen = list(itertools.chain.from_iterable(one.cells(plan) for one in shown))
    jobs = {job for one in shown for cell in one.cells(plan) for job in jobs_of(cell, one.base)}
    jobs.update(job for cell in again for job in jobs_of(cell, seed=1))
    num_requests = sum(plan.sizes.count(cell) for _, cell, _ in jobs)
    context.say(f"{len(chosen)} cells, {len(jobs)} simulations: {num_requests:,} requests")
    with context.bar(num_requests, "gain map") as progress:
        cells = Cells(context.testbed, plan.sizes, progress)
        grids = [one.measured(plan, cells) for one in shown]
        changes = [abs(cells.throughput_gain(cell, seed=1) / cells.throughput_gain(cell) - 1) for cell in again]
    static, dynamic = grids[0], grids[1]
    widest, most = max(static.values[-1]), max(dynamic.values[-1])
    return Outcome(
        value=widest,
        unit="× static at the widest spread",
        ours=f"{times(min(static.values[0]))} without spread to {times(widest)} at the widest; over dynamic batches of "
        f"answers about equally long {times(min(dynamic.values[0]))} to {times(most)}",
        workload=_workload(context, plan, len(chosen)),
        differs=_differs(grids, max(changes)),
        where=context.where,
        chart=Chart(
            "What continuous batching gains, by the spread of answer lengths",
            "continuous ÷ static or dynamic: times the throughput, or times shorter",
            heat=HeatMap(tuple(grids), BOUNDS, "×"),
            caption=f"Answers of {plan.mean} tokens on average, up to {plan.longest:,}; prompts are "
            f"{percent(plan.prompt_share)} of the tokens where this does not change.",
        ),
        numbers=_numbers({one.short: grid for one, grid in zip(shown, grids, strict=True)}),
    )


@dataclass(frozen=True)
class _Shown:
    """A grid of the map before it is measured."""

    short: str
    title: str
    x: str
    columns: Mapping[str, Mapping[str, Any]]
    """For each column, what is other than usual in its cells."""
    base: str = STATIC
    is_latency: bool = False

    def cells(self, plan: Plan) -> list[Cell]:
        """Row by row."""
        return [plan.cell(spread, **changed) for spread in plan.spreads for changed in self.columns.values()]

    def measured(self, plan: Plan, cells: Cells) -> HeatGrid:
        gains = [
            cells.latency_gain(cell) if self.is_latency else cells.throughput_gain(cell, self.base)
            for cell in self.cells(plan)
        ]
        width = len(self.columns)
        values = tuple(tuple(gains[place * width : (place + 1) * width]) for place in range(len(plan.spreads)))
        return HeatGrid(self.title, self.x, _SPREAD, tuple(self.columns), _names(plan.spreads), values)


def _shown_grids(plan: Plan) -> list[_Shown]:
    batches = {f"{batch}": {"batch": batch} for batch in plan.batches}
    usual = f"(batches of {plan.batch})"
    return [
        _Shown("over static, batch", "Throughput over static batches, by the limit of the batch", _BATCHES, batches),
        _Shown(
            "over dynamic, batch",
            "Throughput over dynamic batches, of answers about equally long, by the limit of the batch",
            _BATCHES,
            batches,
            base=DYNAMIC,
        ),
        _Shown(
            "over static, prompts %",
            f"Throughput over static batches, by the share of prompts {usual}",
            "prompts, % of all tokens",
            {f"{100 * share:g}": {"prompt_share": share} for share in plan.prompt_shares},
        ),
        _Shown(
            "latency, load %",
            f"Time to the last token, static ÷ continuous, by the load {usual}",
            "arrivals, % of what static batches serve",
            {f"{100 * load:g}": {"load": load} for load in plan.loads},
            is_latency=True,
        ),
    ]


def _again(plan: Plan) -> list[Cell]:
    """The cells that are also simulated with another order of their lengths: those of the widest spread."""
    return [plan.cell(plan.spreads[-1], batch=batch) for batch in plan.batches]


def _names(spreads: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{spread:g}" for spread in spreads)


def _numbers(grids: Mapping[str, HeatGrid]) -> dict[str, dict[str, float]]:
    """A row for each column of each grid, since all grids have the same spreads."""
    return {
        f"{name} {column}": {f"P99/P50 {row}": grid.values[place][number] for place, row in enumerate(grid.rows)}
        for name, grid in grids.items()
        for number, column in enumerate(grid.columns)
    }


def _workload(context: Context, plan: Plan, num_cells: int) -> str:
    return (
        f"{num_cells} cells; answers lognormal with mean {plan.mean} up to {plan.longest:,}, spread "
        f"{plan.spreads[0]:g} to {plan.spreads[-1]:g}; batches of {plan.batches[0]} to {plan.batches[-1]}; "
        f"{plan.sizes.batches} full batches of work at once, or more, to {plan.sizes.least} requests{context.divided}"
    )


def _differs(grids: Sequence[HeatGrid], error: float) -> str:
    static, dynamic, prompts, load = grids
    return sentences(
        [
            *(_reached(static, bound) for bound in BOUNDS[1:]),
            "The published bases are slower programs: static batches here are not padded, and their finished requests "
            "compute nothing, so that the last steps of a batch are short. Memory is paged on both sides; what "
            "reserving it costs is another claim (eras).",
            "Dynamic batches that know no lengths are static ones while requests wait. Those of answers about equally "
            f"long leave {times(max(map(max, dynamic.values)))} at most: of what waits few requests are alike, so that "
            "rare lengths run in batches that are nearly empty.",
            f"By the share of prompts the widest spread gains {_by_column(prompts)} of the tokens: prompts take "
            "the same time on both sides.",
            "At a load that static batches keep up with, both serve the same throughput, and the gain is in the wait: "
            f"{times(load.values[-1][0])} shorter at {load.columns[0]}% of that load, {times(load.values[-1][-1])} at "
            f"{load.columns[-1]}%.",
            f"Another order of the same lengths changes the row of the widest spread by {percent(error)} at most.",
        ]
    )


def _by_column(grid: HeatGrid) -> str:
    """The gain at the widest spread, for each column in percent."""
    return ", ".join(f"{times(one)} at {column}%" for column, one in zip(grid.columns, grid.values[-1], strict=True))


def _reached(grid: HeatGrid, bound: float) -> str:
    """Where a gain is reached first."""
    for row, values in zip(grid.rows, grid.values, strict=True):
        for column, value in zip(grid.columns, values, strict=True):
            if value >= bound:
                return f"{bound:g}× is reached where P99 is {row} times the median, from batches of {column} on."
    return f"{bound:g}× is reached nowhere."


# ---- four cells on the real engine ----------------------------------------------------------------------------------


def _measure_engine(context: Context, plan: Plan) -> Outcome:
    """Four cells on the engine, beside the same cells in the simulator, calibrated on this machine just before."""
    context.say("calibrating this machine")
    twin = context.testbed.simulated()
    chosen = [plan.cell(spread, batch=batch) for spread in _ends(plan.spreads) for batch in _ends(plan.batches)]
    simulated = Cells(twin, plan.sizes)
    rounds: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in chosen}
    num_requests = 2 * context.num_rounds * sum(plan.sizes.count(cell) for cell in chosen)
    context.say(f"four cells: {num_requests:,} requests")
    with context.bar(num_requests, "four cells") as progress:
        engine = Cells(context.testbed, plan.sizes, progress)
        for _ in range(context.num_rounds):
            for cell in chosen:
                rounds[cell].append({mode: engine.serve(mode, cell).tok_s for mode in (STATIC, CONTINUOUS)})
    best = {cell: {mode: max(one[mode] for one in rounds[cell]) for mode in (STATIC, CONTINUOUS)} for cell in chosen}
    measured = {cell: best[cell][CONTINUOUS] / best[cell][STATIC] for cell in chosen}
    expected = {cell: simulated.throughput_gain(cell) for cell in chosen}
    errors = {cell: expected[cell] / measured[cell] - 1 for cell in chosen}
    worst = max(errors.values(), key=abs)
    widest = measured[chosen[-1]]
    return Outcome(
        value=widest,
        unit="× static at the widest spread",
        ours=f"{times(measured[chosen[1]])} without spread to {times(widest)} at P99/P50 {plan.spreads[-1]:g}; four "
        f"cells simulated for this machine are off by {percent(abs(worst))} at most",
        workload=_workload(context, plan, len(chosen)),
        differs=_engine_differs(context, rounds, worst),
        where=context.where,
        chart=Chart(
            "What continuous batching gains here, measured and simulated",
            "throughput of continuous batching ÷ static",
            heat=HeatMap(
                tuple(_pair(title, plan, gains) for title, gains in (("Engine", measured), ("Simulated", expected))),
                BOUNDS,
                "×",
            ),
            caption="The simulator was calibrated on this machine in the same run.",
        ),
        numbers={
            _name(cell): {
                "static tokens/s": best[cell][STATIC],
                "continuous tokens/s": best[cell][CONTINUOUS],
                "gain": measured[cell],
                "simulated gain": expected[cell],
                "error, %": 100 * errors[cell],
            }
            for cell in chosen
        },
    )


def _ends(values: Sequence[Any]) -> tuple[Any, Any]:
    return values[0], values[-1]


def _name(cell: Cell) -> str:
    return f"P99/P50 {cell.spread:g}, batches of {cell.batch}"


def _pair(title: str, plan: Plan, gains: Mapping[Cell, float]) -> HeatGrid:
    batches, spreads = _ends(plan.batches), _ends(plan.spreads)
    values = tuple(tuple(gains[plan.cell(spread, batch=batch)] for batch in batches) for spread in spreads)
    columns = tuple(map(str, batches))
    return HeatGrid(
        title, "requests in a batch, at most", _SPREAD, columns, tuple(f"{one:g}" for one in spreads), values
    )


def _engine_differs(context: Context, rounds: Mapping[Cell, Sequence[Mapping[str, float]]], worst: float) -> str:
    ratios = [one[CONTINUOUS] / one[STATIC] for one in itertools.chain.from_iterable(rounds.values())]
    return sentences(
        [
            f"The largest error of the simulated gains is {percent(worst, signed=True)}; 10% was wanted.",
            "On a CPU a step takes longer the more requests compute in it, so that a batch which empties also gets "
            "faster, and there is less to gain than on a GPU, where most of a step is reading the weights."
            if context.testbed.is_cpu
            else "",
            f"Each cell had {context.num_rounds} rounds, in turns, of which the fastest of each side counts; single "
            f"rounds of all cells gave {times(min(ratios))} to {times(max(ratios))}."
            if context.num_rounds > 1
            else "",
        ]
    )


GAIN_MAP = Claim(
    id="gain-map",
    title="Gain by the spread of lengths",
    published="Continuous batching gains 2–36×, typically 3–8×, 23× at the largest spread of lengths; without nothing.",
    source="Anyscale (2023), Orca (OSDI 2022), and articles that followed; OPT-13B on an A100, GPT-3 175B",
    workload="answers from all alike to some of 10 and others of 1,000 tokens",
    method="Throughput over static batches, and over dynamic ones of about equally long answers, while requests wait; "
    "on the engine four cells, beside a simulator that is calibrated there.",
    measure=measure_gain_map,
    engine="asked",
)
