"""Prints the time of profiled steps as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.console.step_trace import MAX_KERNELS, StepSummary, TimeShare


def print_summary(console: Console, summary: StepSummary) -> None:
    """Print how the time of the profiled steps was spent."""
    what = "kernels" if summary.has_kernels else "torch operators"
    console.print(Text(f"\nprofile of {summary.num_steps} steps: {summary.step_us:,.0f} µs a step", style="bold"))
    if not summary.has_kernels:
        console.print(Text("On a CPU torch's profiler sees torch's operators only, not the native kernels.", "dim"))
    table = _table("per step", "µs", "calls", "share")
    for share in summary.host:
        table.add_row(f"host: {share.name}", *_share_cells(share, summary))
    if summary.host:
        table.add_row()
    shown, rest = summary.computing[:MAX_KERNELS], summary.computing[MAX_KERNELS:]
    for share in shown:
        table.add_row(f"{share.name} [dim]({share.kind})[/dim]", *_share_cells(share, summary))
    if rest:
        others = TimeShare(
            f"{len(rest)} more", "", sum(s.us_per_step for s in rest), sum(s.calls_per_step for s in rest)
        )
        table.add_row(others.name, *_share_cells(others, summary))
    table.add_row()
    for kind, us in summary.by_kind().items():
        table.add_row(f"all {kind}", f"{us:,.1f}", "", f"{us / summary.step_us:.1%}")
    table.add_row()
    table.add_row(f"busy with {what}", f"{summary.busy_us:,.1f}", "", f"{summary.busy_share:.1%}", style="bold")
    gaps = f"{summary.gaps_per_step:,.1f}"
    table.add_row("idle", f"{summary.idle_us:,.1f}", gaps, f"{1 - summary.busy_share:.1%}")
    table.add_row("longest gap", f"{summary.longest_gap_us:,.1f}", "", "")
    console.print(table)


def _share_cells(share: TimeShare, summary: StepSummary) -> tuple[str, str, str]:
    return (
        f"{share.us_per_step:,.1f}",
        f"{share.calls_per_step:,.1f}",
        f"{share.us_per_step / summary.step_us:.1%}",
    )


def _table(first: str, *titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first)
    for title in titles:
        table.add_column(title, justify="right")
    return table
