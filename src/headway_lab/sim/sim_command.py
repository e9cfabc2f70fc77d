"""`headway sim`: simulates a workload on a calibrated machine, in seconds.

The scheduler, the cache and the policies are the real ones; only the device is replaced by its cost model. All
combinations of several policies, rates and seeds are simulated, and their results are shown side by side.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import SCHEDULING_POLICIES
from headway.console.flags import add_flags, count
from headway.console.output_files import check_writable, print_table, write_json, write_text
from headway.errors import ConfigError, did_you_mean
from headway.front.roles import TOGETHER, Roles
from headway.progress import progress_bar
from headway_lab.bench.load_flags import add_judging_flags, judging_of
from headway_lab.bench.pricing import add_price_flag
from headway_lab.charts.html_page import write_page
from headway_lab.sim.sim_flags import (
    PREDICTORS,
    add_calibration_flag,
    add_link_flags,
    add_work_flags,
    draw_work,
    link_of,
    load_calibration,
    load_work,
    simulated_flags,
    simulated_options,
)
from headway_lab.workload.rates import arrival_rate

if TYPE_CHECKING:
    from headway_lab.sim.calibration import Calibration
    from headway_lab.sim.setup import Setup
    from headway_lab.sim.sim_comparison import Case, SimRun
    from headway_lab.workload.bench_requests import BenchRequest
    from headway_lab.workload.workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_calibration_flag(parser)
    parser.add_argument(
        "--rate",
        type=_rates,
        default=[None],
        metavar="LIST",
        help="Requests/s instead of the workload's own rate; a trace is stretched to it. inf: all at once. Several are "
        "simulated one after the other, e.g. 5,10,20.",
    )
    parser.add_argument(
        "--replicas",
        type=count(1),
        metavar="N",
        help="Number of replicas, each a machine of its own. (default: 1, or those of --roles)",
    )
    parser.add_argument(
        "--roles",
        default=TOGETHER,
        metavar="prefill=P,decode=D",
        help="P replicas compute prompts, where that is worth it, and D have all requests: blocks travel from the ones "
        "to the others. (default: %(default)s: all do both)",
    )
    add_link_flags(parser)
    from headway.front.router import ROUTERS

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
        help="Seed for the random spread of step times. (default: 0)",
    )
    parser.add_argument(
        "--seeds",
        type=count(1),
        default=1,
        metavar="N",
        help="Simulate N draws of the work, from --work-seed and --sim-seed on, and show means and their intervals. "
        "(default: %(default)s)",
    )
    add_judging_flags(parser)
    add_price_flag(parser, more=" A replica takes a device for each of its ranks.")
    parser.add_argument("--output-json", metavar="FILE", help="Write the result here; keys as of 'headway bench'.")
    parser.add_argument("--csv", metavar="FILE", help="Write a line for each request here.")
    parser.add_argument("--html", metavar="FILE", help="Write a page with charts here.")
    add_work_flags(parser)
    add_flags(parser, simulated_flags())


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.output_json, arguments.html, arguments.csv)
    calibration = load_calibration(arguments.calibration)
    policies = _policies(arguments.policy)
    options = simulated_options(arguments)
    if policies and "scheduling_policy" in options:
        raise ConfigError("--policy compares policies, --scheduling-policy sets one; give one of the two.")
    simulator = _Simulator(arguments, calibration, options)
    cases = simulator.cases(policies or [simulator.own_policy])
    if len(cases) == 1 and arguments.seeds == 1:
        notes = simulator.tell_one(cases[0])
    else:
        notes = simulator.tell_many(cases)
    if arguments.output_json is not None:
        results = [simulator.as_json(case, one) for case in cases for one in case.runs]
        write_json(arguments.output_json, results[0] if len(results) == 1 else {"simulated": True, "runs": results})
    if arguments.csv is not None:
        from headway_lab.sim.sim_comparison import csv_text

        write_text(arguments.csv, csv_text(cases))
    if arguments.html is not None:
        simulator.write_page(cases, notes)
    return 0


class _Simulator:
    """Work on a machine, with the options of a command."""

    def __init__(self, arguments: argparse.Namespace, calibration: Calibration, options: dict[str, Any]) -> None:
        from headway_lab.sim.setup import set_up

        self._arguments, self._calibration, self._options = arguments, calibration, options
        self._roles = None if arguments.roles == TOGETHER else Roles.parse(arguments.roles)
        self._num_replicas = _num_replicas(arguments.replicas, self._roles)
        self._link = link_of(arguments, [calibration], has_roles=self._roles is not None)
        self._workload: Workload = load_work(arguments)
        self._judging = judging_of(arguments)
        self._plain: Setup = set_up(calibration, options, link=self._link)
        self._took_s = 0.0
        self._most: float | None = None

    @property
    def own_policy(self) -> str:
        """The calibrated scheduler's policy, for when no policy is named."""
        return self._plain.scheduler.scheduling_policy

    def cases(self, policies: list[str]) -> list[Case]:
        """Every policy at every rate, on the same work."""
        from headway_lab.sim.setup import set_up
        from headway_lab.sim.sim_comparison import Case, overload

        cases = []
        for rate in self._arguments.rate:
            works = [self._draw(rate, number) for number in range(self._arguments.seeds)]
            for policy in policies:
                setup = set_up(self._calibration, {**self._options, "scheduling_policy": policy}, link=self._link)
                runs = [self._simulate(work, setup, number) for number, work in enumerate(works)]
                beyond = overload(runs[0].metrics, partial(self._capacity, works[0]))
                cases.append(Case(policy, rate, runs, beyond))
        return cases

    def _capacity(self, work: list[BenchRequest]) -> float:
        """The capacity of all replicas. Drawn at another rate, the requests are the same."""
        from headway_lab.sim.sim_comparison import capacity

        if self._most is None:
            most = capacity(work, self._calibration, self._options, link=self._link, roles=self._roles)
            self._most = most if self._roles is not None else self._num_replicas * most
        return self._most

    def tell_one(self, case: Case) -> list[str]:
        """Print the usual block of results, under another heading; return the notes beside it."""
        from headway_lab.bench.serving_report import serving_block
        from headway_lab.sim.sim_comparison import class_table, overload_notes

        (run,) = case.runs
        print(serving_block(run.metrics, title="Simulated Serving Result"))
        prices = [] if run.metrics.prices is None else [run.metrics.prices.note]
        notes = [*overload_notes([case]), self._targets_note(run), self._speed_note(run), *prices]
        if (by_class := class_table([case])) is not None:
            print("\nBy class, latencies in ms:")
            print_table(*by_class)
        print("\n" + "\n".join([*notes, *self._trust(run)]))
        return notes

    def tell_many(self, cases: list[Case]) -> list[str]:
        """Print tables of all cases; return the notes beside them."""
        from headway_lab.sim.sim_comparison import class_table, notes_on, run_table

        calibration = self._calibration
        print(f"Simulated: {self._title} on {calibration.device_name}, {calibration.model}; latencies in ms\n")
        print_table(*run_table(cases))
        if (by_class := class_table(cases)) is not None:
            print("\nBy class:")
            print_table(*by_class)
        first = cases[0].runs[0]
        notes = [*notes_on(cases), self._targets_note(first)]
        print("\n" + "\n".join([*notes, *self._trust(first)]))
        return notes

    def as_json(self, case: Case, run: SimRun) -> dict[str, Any]:
        from headway_lab.sim.sim_report import simulation_json

        result = simulation_json(run.metrics.as_json(), self._calibration, run.simulation)
        beyond = {"beyond_capacity": case.overload is not None}
        told = {
            **beyond,
            "policy": case.policy,
            "rate": "inf" if case.rate == float("inf") else case.rate,
            "seed": run.seed,
        }
        by_class = {name: metrics.as_json() for name, metrics in run.classes.items()}
        return {**told, **result, "classes": by_class}

    def write_page(self, cases: list[Case], notes: list[str]) -> None:
        from headway_lab.bench.serving_report import online_page
        from headway_lab.bench.slo_targets import targets_by_class
        from headway_lab.sim.sim_comparison import class_table, comparison_page

        arguments, title, run = self._arguments, f"Simulated: {self._title}", cases[0].runs[0]
        if len(cases) == 1 and len(cases[0].runs) == 1:
            page = online_page(
                title,
                metrics=run.metrics,
                timelines=run.simulation.timelines,
                samples=run.simulation.samples,
                notes=notes,
                targets=targets_by_class(run.given, run.options),
            )
            if (by_class := class_table(cases)) is not None:
                page.heading("By class, in milliseconds")
                page.table(*by_class)
        else:
            page = comparison_page(title, cases, notes=notes)
        page.heading("How far to trust it")
        for note in self._trust(run):
            page.text(note)
        last = arguments.seeds - 1
        seeds = [f"{s} to {s + last}" if last else f"{s}" for s in (arguments.work_seed, arguments.sim_seed)]
        machine = f"{self._calibration.model} on {self._calibration.device_name}, simulated"
        write_page(arguments, page, seed=f"{seeds[0]} of the work, {seeds[1]} of the steps", machine=machine)

    @property
    def _title(self) -> str:
        return Path(self._arguments.workload).stem

    def _draw(self, rate: float | None, number: int) -> list[BenchRequest]:
        from headway_lab.sim.setup import with_oracle

        arguments = argparse.Namespace(**{**vars(self._arguments), "work_seed": self._arguments.work_seed + number})
        work = draw_work(arguments, self._workload, vocab_size=self._calibration.vocab_size, rate=rate)
        return with_oracle(work) if arguments.length_predictor == "oracle" else work

    def _simulate(self, work: list[BenchRequest], setup: Setup, number: int) -> SimRun:
        from headway_lab.sim.setup import check_work
        from headway_lab.sim.sim_comparison import SimRun
        from headway_lab.sim.simulate import simulate

        arguments = self._arguments
        check_work(work, setup.machine)
        started_s = time.perf_counter()
        with progress_bar(len(work), setup.scheduler.scheduling_policy) as progress:
            done = simulate(
                work,
                setup.machine,
                setup.scheduler,
                setup.cache,
                num_replicas=self._num_replicas,
                router=arguments.router,
                roles=self._roles,
                seed=arguments.sim_seed + number,
                forecasts=True,
                progress=progress,
            )
        self._took_s = time.perf_counter() - started_s
        metrics = self._judging.metrics(
            work,  # type: ignore[arg-type]
            done.timelines,
            done.duration_s,
            num_devices=self._num_replicas * self._calibration.tensor_parallel_size,
            prompt_share=done.token_time.prompt_share,
        )
        return SimRun(arguments.work_seed + number, work, done, metrics, self._judging.targets)

    def _targets_note(self, run: SimRun) -> str:
        from headway_lab.bench.slo_targets import targets_note

        return targets_note(run.given, run.options)

    def _trust(self, run: SimRun) -> list[str]:
        """The notes beside all simulated numbers."""
        from headway_lab.sim.sim_report import replica_notes, trust_notes, utilisation_notes

        told = replica_notes(run.simulation, self._plain.machine)
        return [*trust_notes(self._calibration), *self._plain.notes, *told, *utilisation_notes(run.simulation)]

    def _speed_note(self, run: SimRun) -> str:
        simulation = run.simulation
        busy = simulation.busy_s / max(simulation.duration_s * len(simulation.num_routed), 1e-12)
        return (
            f"{simulation.duration_s:,.1f} s in {self._took_s:.1f} s: {len(simulation.timelines):,} requests, "
            f"{simulation.num_steps:,} steps, devices busy {busy:.0%} of the time, "
            f"{simulation.num_hit_tokens / max(simulation.num_queried_tokens, 1):.0%} of prompt tokens from the cache; "
            f"{simulation.most_waiting or 'no'} request{'' if simulation.most_waiting < 2 else 's'} waited for a seat"
            f"{' at once, at most' if simulation.most_waiting else ''}."
        )


def _num_replicas(given: int | None, roles: Roles | None) -> int:
    if roles is None:
        return given or 1
    if given not in (None, roles.num_replicas):
        raise ConfigError(f"--roles {roles} are {roles.num_replicas} replicas, not {given}; leave --replicas out.")
    return roles.num_replicas


def _rates(text: str) -> list[float | None]:
    """A flag's type: rates, separated by commas."""
    return [arrival_rate(part) for part in text.split(",")]


def _policies(text: str | None) -> list[str]:
    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SCHEDULING_POLICIES:
            hint = did_you_mean(name, SCHEDULING_POLICIES) or f" They are {', '.join(SCHEDULING_POLICIES)}."
            raise ConfigError(f"--policy: there is no scheduling policy '{name}'.{hint}")
    return names
