"""The printed result of rounds: model, machine, each round, the best one, the floor and the ratio to it; profiles."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from headway import __version__
from headway.worker.ceilings import Ceilings
from headway_lab.bench.environment import StartUp, device_name
from headway_lab.bench.online_metrics import SHOWN_PERCENTILES, OnlineMetrics
from headway_lab.bench.timelines import Measure, RoundTimes, best_of

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class Setting:
    """The conditions of a measurement, without its result."""

    model: str
    device: str
    dtype: str
    engine: Mapping[str, Any]
    versions: Mapping[str, str]
    work: str
    notes: Sequence[str]
    start_up: StartUp
    ceilings: Ceilings

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_setting(
    engine: LLMEngine, *, model: str, work: str, notes: Sequence[str], start_up: StartUp, ceilings: Ceilings
) -> Setting:
    """Read from the engine what a reader of the result must know."""
    import torch

    plan, limits = engine.plan, engine.config.scheduler
    return Setting(
        model=model,
        device=device_name(plan.device),
        dtype=plan.dtype,
        engine={
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "target_itl_ms": limits.target_itl_ms,
            "async_scheduling": engine.config.device.async_scheduling,
            "max_model_len": plan.max_model_len,
            "num_kv_blocks": plan.num_blocks,
            "block_size": plan.block_size,
            "kv_dtype": plan.kv_dtype,
        },
        versions={"headway": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        work=work,
        notes=notes,
        start_up=start_up,
        ceilings=ceilings,
    )


def print_setting(console: Console, title: str, setting: Setting) -> None:
    """The block above the numbers."""
    engine = " · ".join(f"{name} {_number(value)}" for name, value in setting.engine.items())
    versions = " · ".join(f"{name} {value}" for name, value in setting.versions.items())
    rows = [
        ("model", f"{setting.model}, {setting.dtype}"),
        ("device", setting.device),
        ("engine", engine),
        ("versions", versions),
        ("work", setting.work),
        *(("", note) for note in setting.notes),
        ("start-up", str(setting.start_up)),
        ("ceilings", str(setting.ceilings)),
    ]
    console.print(Text(title, style="bold"))
    console.print(_pairs(rows))
    console.print()


def print_rounds(
    console: Console, measures: Sequence[Measure], rounds: Sequence[RoundTimes], floor: RoundTimes
) -> None:
    """Print a row for each round, then the best, the floor and the ratio."""
    best = best_of(rounds)
    table = _table("round", *(measure.title for measure in measures))
    for number, times in enumerate(rounds, start=1):
        table.add_row(str(number), *(measure.text(times) for measure in measures))
    table.add_row()
    table.add_row("best", *(measure.text(best) for measure in measures), style="bold")
    table.add_row("floor", *(measure.text(floor) for measure in measures))
    ratios = [measure.ratio(best, floor) for measure in measures]
    table.add_row("ratio", *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    console.print(table)


def print_online(console: Console, metrics: OnlineMetrics, floor: OnlineMetrics, *, title: str) -> None:
    """Print latencies by percentile, each beside the floor's latency of a request that is alone on the machine."""
    percentiles = [f"P{percent}" for percent in SHOWN_PERCENTILES]
    table = _table(title, "mean", *percentiles, "max", "floor P50", "ratio P50")
    names = {"ttft": "TTFT ms", "tpot": "TPOT ms", "itl": "ITL ms", "e2el": "E2E ms"}
    for name, distribution in metrics.latencies.items():
        least = floor.latencies[name].percentiles[50]
        median = distribution.percentiles[50]
        values = (distribution.mean, *distribution.percentiles.values(), distribution.max, least)
        table.add_row(names[name], *(f"{value:,.2f}" for value in values), f"{median / least:.2f}")
    console.print(table)
    lost = Text(f"{metrics.num_lost}", style="bold red" if metrics.num_lost else "")
    console.print(
        _pairs(
            [
                ("P99/P50 ITL", f"{metrics.itl_p99_over_p50:.2f}"),
                ("output tok/s", f"{metrics.output_tok_s:,.1f} (floor {floor.output_tok_s:,.1f}, set by the arrivals)"),
                ("finished", f"{metrics.num_completed}"),
                ("lost", lost),
                ("preemptions", f"{metrics.num_preemptions}"),
            ]
        )
    )


def _table(first: str, *titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first)
    for title in titles:
        table.add_column(title, justify="right")
    return table


def _pairs(rows: Iterable[tuple[str, str | Text]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
