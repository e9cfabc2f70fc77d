"""Calibrations, simulations and checks as tables, Markdown and notes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from headway.core.step_work import StepWork
from headway.core.utilisation import Utilisation
from headway_lab.bench.forecast_errors import ForecastErrors
from headway_lab.bench.timelines import percentile
from headway_lab.sim.calibration import Calibration, Machine
from headway_lab.sim.drafting import Drafting
from headway_lab.sim.sim_accuracy import Check, percent_text
from headway_lab.sim.simulate import Simulation
from headway_lab.sim.step_timing import WINDOW_S

Table = tuple[list[str], list[list[str]]]
"""(titles, rows)"""

KIND_NAMES = {"decode": "decode only", "mixed": "mixed", "prefill": "prompts only"}


def calibration_facts(calibration: Calibration) -> dict[str, str]:
    """What a reader of simulated numbers should know about the machine."""
    scheduler, host = calibration.scheduler, calibration.host
    facts = {
        "model": f"{calibration.model} ({calibration.dtype})",
        "device": calibration.device_name or calibration.device,
        "KV cache": f"{calibration.num_blocks:,} blocks of {calibration.block_size} tokens ({calibration.kv_dtype}), "
        f"requests of up to {calibration.max_model_len:,} tokens",
        "scheduler": ", ".join(
            f"{name} {scheduler[name]}"
            for name in ("max_num_seqs", "max_num_batched_tokens", "target_itl_ms", "scheduling_policy")
            if name in scheduler
        ),
        **({"ranks": f"one of {calibration.tensor_parallel_size}"} if calibration.tensor_parallel_size > 1 else {}),
        "steps": "planned while the one before runs" if calibration.overlap else "one after the other",
        "host": f"{1e3 * host.before(1):.2f} ms before a step and {1e3 * host.after(1):.2f} ms after it, "
        f"{1e6 * (host.before_row_s + host.after_row_s):.0f} µs more for each request",
        "examples": "; ".join(f"{name} {1e3 * calibration.cost.seconds(work):.1f} ms" for name, work in _EXAMPLES),
    }
    if calibration.drafting != Drafting():
        facts["guesses"] = str(calibration.drafting)
    if calibration.num_host_slots:
        rate = calibration.bytes_per_block / calibration.restore_block_s / 1e9 if calibration.restore_block_s else 0.0
        facts["host cache"] = f"{calibration.num_host_slots:,} blocks, {rate:.1f} GB/s back"
    facts["versions"] = ", ".join(f"{name} {value}" for name, value in calibration.versions.items())
    return facts


_EXAMPLES = (
    ("1 decode", StepWork(1, 1, 1, 256)),
    ("16 decodes", StepWork(16, 16, 16, 16 * 256)),
    ("64 decodes", StepWork(64, 64, 64, 64 * 256)),
    ("a prompt of 256", StepWork(256, 1, 1, 0, 1, 256 * 128.0)),
    ("16 decodes and 256 of a prompt", StepWork(272, 17, 17, 16 * 256, 1, 256 * 128.0)),
)


def fit_rows(calibration: Calibration) -> Table:
    """The errors of the cost model."""
    rows = [
        [KIND_NAMES[e.kind], f"{e.num_steps:,}", f"{100 * e.mean:.1f}%", f"{100 * e.p95:.1f}%", percent_text(e.bias)]
        for e in calibration.cost.errors
    ]
    return ["steps", "number", "mean error", "P95", "of the sum"], rows


def error_table(check: Check) -> Table:
    titles = ["", "measured", "simulated", "error", "promised", "error at the measured speed"]
    rows = [
        [
            row.key,
            f"{row.measured:,.2f}",
            f"{row.simulated:,.2f}",
            percent_text(row.error) + ("" if row.is_within is not False else " !"),
            "" if row.tolerance is None else f"±{100 * row.tolerance:.0f}%",
            percent_text(row.error_at_measured_speed),
        ]
        for row in check.rows
    ]
    return titles, rows


def check_title(check: Check) -> str:
    rate = "all at once" if check.rate is None else f"{check.rate:.3g} requests/s"
    load = "" if check.load is None else f", {100 * check.load:.0f}% of capacity"
    return f"{check.name}: {check.num_requests:,} requests, {rate}{load}"


def speed_note(check: Check) -> str:
    """A note on how the machine's speed differed from its calibration during the replay."""
    return (
        f"The real steps took {check.speed:.3f} times what the calibration expects of the same steps. The last column "
        "is simulated with the same ups and downs, taken from the real steps in windows of "
        f"{WINDOW_S:g} s: what is left without errors in the time of steps."
    )


def checks_markdown(calibration: Calibration, checks: Sequence[Check], *, name: str = "") -> str:
    """A page for docs/results; `name`: that of the engine's variant, if there are several."""
    lines = [f"# Simulated against measured{f': {name}' if name else ''}", ""]
    lines += [f"* {name}: {value}" for name, value in calibration_facts(calibration).items()]
    lines += ["", "The cost model on steps that it was not fitted to:", "", *markdown_table(fit_rows(calibration))]
    for check in checks:
        lines += ["", f"## {check_title(check)}", "", *markdown_table(error_table(check)), "", speed_note(check)]
    return "\n".join(lines) + "\n"


def simulation_json(result: dict[str, Any], calibration: Calibration, simulation: Simulation) -> dict[str, Any]:
    """A benchmark's keys, and beside them a mark that it was simulated and how large the errors may be."""
    return {
        **result,
        **ForecastErrors.of(simulation.timelines).as_json(),
        **_transfer_numbers(simulation),
        "simulated": True,
        **({} if simulation.utilisation is None else {"utilisation": Utilisation.of(simulation.utilisation).as_json()}),
        "num_steps": simulation.num_steps,
        "most_waiting": simulation.most_waiting,
        "device_busy_share": simulation.busy_s / max(simulation.duration_s * len(simulation.num_routed), 1e-12),
        "prefix_cache_hit_rate": simulation.num_hit_tokens / max(simulation.num_queried_tokens, 1),
        "requests_by_replica": simulation.num_routed,
        "calibration": {
            "model": calibration.model,
            "device": calibration.device_name,
            "fit_errors": [error.as_json() for error in calibration.cost.errors],
            "verified": calibration.verified,
        },
    }


def _transfer_numbers(simulation: Simulation) -> dict[str, Any]:
    """The numbers of transfers between replicas with roles; empty without roles."""
    if not simulation.num_prefill:
        return {}
    transfers = simulation.transfers
    waited_ms = [1e3 * (transfer.to_s - transfer.asked_s) for transfer in transfers]
    return {
        "prefill_replicas": simulation.num_prefill,
        "prompts_elsewhere": simulation.num_elsewhere,
        "transferred_blocks": sum(transfer.num_blocks for transfer in transfers),
        "mean_transfer_ms": statistics.fmean(waited_ms) if waited_ms else None,
        "p99_transfer_ms": percentile(waited_ms, 99) if waited_ms else None,
        "transfer_hidden_share": simulation.hidden_share,
    }


def replica_notes(simulation: Simulation, machine: Machine) -> list[str]:
    """Notes on how much each replica did, if there are several."""
    num_routed = simulation.num_routed
    if len(num_routed) == 1:
        return []
    num_serving = len(num_routed) - simulation.num_prefill
    shares = [f"{number:,}" for number in num_routed]
    if not simulation.num_prefill:
        return [f"{num_serving} replicas, with {', '.join(shares)} requests."]
    numbers, link = _transfer_numbers(simulation), machine.link
    who = (
        f"Decode replicas: {num_serving}, with {', '.join(shares[:num_serving])} requests; prefill replicas: "
        f"{simulation.num_prefill}, with {', '.join(shares[num_serving:])} prompts."
    )
    num_sent, speed = simulation.num_elsewhere, f"{link.gb_s:g} GB/s and {1e6 * link.latency_s:g} µs"
    told = f"Computed elsewhere, with a simulated link of {speed}: "
    if not simulation.transfers:
        return [who, f"{told}{num_sent or 'no'} prompts, and no block had to travel."]
    share = num_sent / len(simulation.timelines)
    num_gb = numbers["transferred_blocks"] * machine.bytes_per_block / 1e9
    mean, p99 = (f"{numbers[key]:.2f} ms" for key in ("mean_transfer_ms", "p99_transfer_ms"))
    return [
        who,
        f"{told}{num_sent:,} prompts ({share:.0%}). Their blocks, {num_gb:,.1f} GB, took {mean} a prompt in the mean, "
        f"{p99} in the P99, waiting for the link included; {simulation.hidden_share:.0%} of that hidden behind steps "
        "for others.",
    ]


def utilisation_notes(simulation: Simulation) -> list[str]:
    """A note on how well the devices were used, where the calibration has what that takes."""
    used = "" if simulation.utilisation is None else str(Utilisation.of(simulation.utilisation))
    return [f"Use of the devices while steps ran: {used}."] if used else []


def trust_notes(calibration: Calibration) -> list[str]:
    """The notes beside every simulated number."""
    errors = ", ".join(f"{KIND_NAMES[e.kind]} {100 * e.mean:.1f}%" for e in calibration.cost.errors)
    notes = [
        f"Simulated, not measured: {calibration.model} on {calibration.device_name}. Mean error of single steps: "
        f"{errors or 'unknown'}."
    ]
    if calibration.verified is None:
        notes.append("Not compared with the real engine: 'headway sim-check' does that.")
        return notes
    for name, errors_by_key in calibration.verified.items():
        told = ", ".join(f"{key} {percent_text(error)}" for key, error in errors_by_key.items())
        notes.append(f"Compared with the real engine, {name}: {told}.")
    return notes


def markdown_table(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    titles, rows = table
    line = ["---", *["---:"] * (len(titles) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (titles, line, *rows)]
