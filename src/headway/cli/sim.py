"""`headway sim`: what a workload would be like on a calibrated machine, in seconds.

The scheduler, the cache and the policies are the real ones; only the device is replaced by its cost model.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING, Any

from headway.cli.bench_files import check_writable, print_table, write_json, write_page
from headway.cli.bench_work import add_judging_flags, judging_of
from headway.cli.counts import count
from headway.cli.flags import add_flags
from headway.cli.progress import progress_bar
from headway.cli.sim_work import (
    PREDICTORS,
    add_rate_flag,
    add_work_flags,
    draw_work,
    load_calibration,
    load_work,
    simulated_flags,
    simulated_options,
)
from headway.config import SCHEDULING_POLICIES, did_you_mean
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.online_metrics import OnlineMetrics
    from headway.sim.calibration import Calibration
    from headway.sim.simulate import Simulation
    from headway.workload.requests import BenchRequest

_COMPARED = ("request_throughput", "request_goodput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration", metavar="FILE", required=True, help="The machine: what 'headway calibrate' wrote."
    )
    add_rate_flag(parser)
    parser.add_argument(
        "--replicas", type=count(1), default=1, metavar="N", help="So many such machines. (default: %(default)s)"
    )
    from headway.sim.router import ROUTERS

    parser.add_argument(
        "--router",
        choices=tuple(ROUTERS),
        default="round-robin",
        help="; ".join(f"{name}: {text}" for name, text in ROUTERS.items()) + ". (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        metavar="LIST",
        help="Simulate each of these scheduling policies and compare them, e.g. fcfs,sjf,slo.",
    )
    parser.add_argument(
        "--length-predictor",
        choices=PREDICTORS,
        default="none",
        help="oracle: policies that let short answers go first know their lengths. (default: %(default)s)",
    )
    parser.add_argument(
        "--sim-seed",
        type=int,
        default=0,
        metavar="N",
        help="Of the spread of steps around their mean times. (default: 0)",
    )
    add_judging_flags(parser)
    parser.add_argument("--output-json", metavar="FILE", help="Write the result here; keys as of 'headway bench'.")
    parser.add_argument("--html", metavar="FILE", help="Write a page with charts here.")
    add_work_flags(parser)
    add_flags(parser, simulated_flags())


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.output_json, arguments.html)
    calibration = load_calibration(arguments.calibration)
    policies = _policies(arguments.policy)
    options = simulated_options(arguments)
    if policies and "scheduling_policy" in options:
        raise ConfigError("--policy compares policies, --scheduling-policy sets one; give one of the two.")
    work = _work(arguments, calibration)
    runs = [_Run(arguments, calibration, work, options)]
    if policies:
        runs = [_Run(arguments, calibration, work, {**options, "scheduling_policy": policy}) for policy in policies]
    if len(runs) == 1:
        _tell_one(runs[0])
    else:
        _tell_many(runs, policies)
    if arguments.output_json is not None:
        results = [one.as_json() for one in runs]
        whole = results[0] if len(results) == 1 else {"simulated": True, "policies": dict(zip(policies, results))}
        write_json(arguments.output_json, whole)
    if arguments.html is not None:
        _write_page(arguments, runs, policies)
    return 0


class _Run:
    """One simulation and what came of it."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        calibration: Calibration,
        work: list[BenchRequest],
        options: dict[str, Any],
    ) -> None:
        from headway.sim.setup import check_work, set_up
        from headway.sim.simulate import simulate

        self.calibration = calibration
        self.setup = set_up(calibration, options)
        check_work(work, self.setup.machine)
        started_s = time.perf_counter()
        with progress_bar(len(work), options.get("scheduling_policy", "")) as progress:
            self.simulation: Simulation = simulate(
                work,
                self.setup.machine,
                self.setup.scheduler,
                self.setup.cache,
                num_replicas=arguments.replicas,
                router=arguments.router,
                seed=arguments.sim_seed,
                progress=progress,
            )
        self.took_s = time.perf_counter() - started_s
        self.metrics: OnlineMetrics = judging_of(arguments).metrics(
            work,  # type: ignore[arg-type]
            self.simulation.timelines,
            self.simulation.duration_s,
        )

    @property
    def notes(self) -> list[str]:
        from headway.sim.report import trust_notes

        simulation = self.simulation
        notes = [*trust_notes(self.calibration), *self.setup.notes]
        if len(simulation.num_routed) > 1:
            shares = ", ".join(f"{number:,}" for number in simulation.num_routed)
            notes.append(f"{len(simulation.num_routed)} replicas, with {shares} requests.")
        notes.append(
            f"{simulation.duration_s:,.1f} s in {self.took_s:.1f} s: {len(simulation.timelines):,} requests, "
            f"{simulation.num_steps:,} steps, devices busy {self._busy:.0%} of the time, "
            f"{simulation.num_hit_tokens / max(simulation.num_queried_tokens, 1):.0%} of prompt tokens from the cache."
        )
        return notes

    @property
    def _busy(self) -> float:
        simulation = self.simulation
        return simulation.busy_s / max(simulation.duration_s * len(simulation.num_routed), 1e-12)

    def as_json(self) -> dict[str, Any]:
        from headway.sim.report import simulation_json

        return simulation_json(self.metrics.as_json(), self.calibration, self.simulation)


def _tell_one(run: _Run) -> None:
    from headway.bench.serving_block import serving_block

    print(serving_block(run.metrics))
    print()
    print("\n".join(run.notes))


def _tell_many(runs: list[_Run], policies: list[str]) -> None:
    results = [one.metrics.as_json() for one in runs]
    keys = [key for key in _COMPARED if results[0][key] is not None]
    rows = []
    for policy, result in zip(policies, results, strict=True):
        values = [result[key] for key in keys]
        rows.append([policy, *("" if value is None else f"{value:,.2f}" for value in values)])
    print_table(["policy", *keys], rows)
    print()
    print("\n".join(runs[0].notes[:-1]))


def _write_page(arguments: argparse.Namespace, runs: list[_Run], policies: list[str]) -> None:
    from headway.bench.online_page import online_page

    first = runs[0]
    if len(runs) == 1:
        page = online_page(
            f"Simulated: {arguments.workload}",
            metrics=first.metrics,
            timelines=first.simulation.timelines,
            samples=first.simulation.samples,
            notes=first.notes,
        )
    else:
        page = _comparison_page(arguments, runs, policies)
    write_page(arguments.html, page)


def _comparison_page(arguments: argparse.Namespace, runs: list[_Run], policies: list[str]) -> Any:
    from headway.charts import Page, cdf_chart

    page = Page("Scheduling policies, simulated", arguments.workload)
    for note in runs[0].notes[:-1]:
        page.text(note)
    results = [one.metrics.as_json() for one in runs]
    page.table(["policy", *_COMPARED], [[name, *(r[key] for key in _COMPARED)] for name, r in zip(policies, results)])
    samples = {name: one.simulation.timelines for name, one in zip(policies, runs)}
    ttfts = {name: [1e3 * line.ttft_s for line in lines] for name, lines in samples.items()}
    ends = {name: [line.e2e_s for line in lines] for name, lines in samples.items()}
    page.chart(cdf_chart("Time to first token", x="ms", samples=ttfts))
    page.chart(cdf_chart("From arrival to last token", x="s", samples=ends))
    return page


def _work(arguments: argparse.Namespace, calibration: Calibration) -> list[BenchRequest]:
    from headway.sim.setup import with_oracle

    rate = math.inf if arguments.rate == math.inf else arguments.rate
    work = draw_work(arguments, load_work(arguments), vocab_size=calibration.vocab_size, rate=rate)
    return with_oracle(work) if arguments.length_predictor == "oracle" else work


def _policies(text: str | None) -> list[str]:
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in SCHEDULING_POLICIES:
            hint = did_you_mean(name, SCHEDULING_POLICIES) or f" They are {', '.join(SCHEDULING_POLICIES)}."
            raise ConfigError(f"--policy: there is no scheduling policy '{name}'.{hint}")
    return names
