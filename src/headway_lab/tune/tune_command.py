"""`headway tune`: which options serve a workload, or logged traffic, best on a calibrated machine.

Options of scheduler and cache that are given on the command line stay as they are; the others are searched. A traffic
log does not have the prompts' contents (or not in a form that is read here), so its requests have random ones, and the
search does not see what the prefix cache saved.

With `--replicas` the command finds how many of these machines are enough to keep the promises. With `--roles all` it
also finds whether some of them should compute prompts for the others, and with several calibrations among how many
devices the model should be divided.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import EngineConfig
from headway.console.flags import add_flags, count, engine_flags
from headway.console.output_files import check_writable, print_table, write_json
from headway.errors import ConfigError
from headway.front.roles import TOGETHER
from headway.predict.traffic_log import read_traffic
from headway.progress import meter
from headway_lab.charts.html_page import write_page
from headway_lab.sim.sim_flags import (
    PREDICTORS,
    add_calibration_flag,
    add_link_flags,
    add_rate_flag,
    add_work_flags,
    draw_work,
    engine_options,
    link_of,
    load_calibration,
    load_work,
    simulated_options,
)
from headway_lab.workload.bench_requests import BenchRequest, highest_token_id

if TYPE_CHECKING:
    from headway_lab.charts import Page
    from headway_lab.sim.calibration import Calibration
    from headway_lab.sim.cost_model import Link
    from headway_lab.tune.tune_goal import Goal
    from headway_lab.tune.tune_report import Verified
    from headway_lab.tune.tune_search import Fleet, Space, Trial, Tuned


_TRIALS = 40
_ALL = "all"
_TEMPERATURE = 1.0


def traffic_work(
    paths: Sequence[str | Path], *, vocab_size: int, num_requests: int | None = None, seed: int = 0
) -> list[BenchRequest]:
    """The last requests of these logs, with times from the first arrival on; `ConfigError` if times are missing."""
    records = read_traffic(paths, most_records=num_requests).records
    named = ", ".join(map(str, paths))
    if not records:
        raise ConfigError(f"The traffic log {named} has no request that ended by itself.")
    times = [record.arrival_s for record in records if record.arrival_s is not None]
    if len(times) < len(records):
        raise ConfigError(
            f"{len(records) - len(times)} of {len(records)} requests of the traffic log {named} have no time of "
            "arrival (arrival_s), and without it their load cannot be replayed."
        )
    rng, highest, first_s = random.Random(seed), highest_token_id(vocab_size), min(times)
    work = [
        BenchRequest(
            [rng.randint(0, highest) for _ in range(max(record.features.keys.num_prompt_tokens, 1))],
            max(record.num_output_tokens, 1),
            arrival_s=time_s - first_s,
        )
        for record, time_s in zip(records, times, strict=True)
    ]
    return sorted(work, key=lambda request: request.arrival_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_calibration_flag(parser, takes_several=True)
    add_rate_flag(parser)
    parser.add_argument(
        "--traffic-log",
        action="append",
        default=[],
        metavar="FILE",
        dest="traffic",
        help="Tune for requests that a server has logged, instead of a workload. May be given several times.",
    )
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="KEY=MS",
        help="What every request is promised, e.g. p99_itl_ms=50 or p99_ttft_ms=1000. May be given several times. "
        "(default: what the workload's classes promise; if they promise nothing, throughput counts)",
    )
    parser.add_argument(
        "--replicas",
        type=replica_numbers,
        metavar="LIST",
        help="Find the fewest replicas of these numbers that keep --slo at this load, e.g. 1-16 or 1,2,4,8, the "
        "options that takes, and by what the next smaller number misses it. More are taken to be no worse.",
    )
    from headway.front.router import ROUTERS

    parser.add_argument(
        "--router",
        choices=(*ROUTERS, _ALL),
        help="With --replicas: how requests are divided among them. all: whichever is best. (default: prefix-aware)",
    )
    parser.add_argument(
        "--roles",
        choices=(TOGETHER, _ALL),
        default=TOGETHER,
        help="With --replicas: whether all replicas do both, or also every number of prefill replicas beside decode "
        "replicas is tried. (default: %(default)s)",
    )
    add_link_flags(parser)
    parser.add_argument(
        "--trials",
        type=count(1),
        default=_TRIALS,
        metavar="N",
        help="As many simulations of the whole work; those of a part count as that part. With --replicas: for each "
        "number whose options are searched. (default: %(default)s)",
    )
    parser.add_argument("--search-seed", type=int, default=0, metavar="N", help="Seed for the search. (default: 0)")
    parser.add_argument(
        "--length-predictor",
        choices=PREDICTORS,
        default="none",
        help="oracle: policies that let short answers go first are searched, and know lengths. (default: %(default)s)",
    )
    parser.add_argument(
        "--verify",
        type=count(0),
        default=0,
        metavar="K",
        help="Measure the default and the best K on the real engine, in this process. (default: 0)",
    )
    parser.add_argument("--output-json", metavar="FILE", help="Write everything that was tried here.")
    parser.add_argument("--html", metavar="FILE", help="Write a page with the Pareto front here.")
    add_work_flags(parser, is_required=False)
    # The traffic log to read is not the one that an engine writes.
    add_flags(parser, [flag for flag in engine_flags() if flag.name not in _NOT_TAKEN])


def replica_numbers(text: str) -> list[int]:
    """A flag's type: numbers and ranges, separated by commas, such as 1-4,8."""
    from headway_lab.sim.simulate import MOST_REPLICAS

    replicas, numbers = count(1, MOST_REPLICAS), set[int]()
    for part in text.split(","):
        first, is_range, last = part.partition("-")
        ends = [replicas(first), replicas(last if is_range else first)]
        if ends[0] > ends[1]:
            raise argparse.ArgumentTypeError(f"'{part}' is an empty range: write {ends[1]}-{ends[0]}")
        numbers.update(range(ends[0], ends[1] + 1))
    return sorted(numbers)


_NOT_TAKEN = frozenset({"traffic_log", "traffic_log_content", "length_predictor", "tensor_parallel_size"})


def run(arguments: argparse.Namespace) -> int:
    from headway_lab.sim.setup import check_work, set_up
    from headway_lab.sim.sim_report import trust_notes
    from headway_lab.tune import Goal, SearchLimits, Space, search
    from headway_lab.tune.tune_report import (
        recommendation,
        recommended,
        trial_table,
        tuned_json,
        tuned_page,
        verified_table,
    )

    check_writable(arguments.output_json, arguments.html)
    Goal.parse(arguments.slo)  # refuses what cannot be promised, before anything is drawn
    _check_engine_options(arguments)
    _check_replicas(arguments)
    calibrations = _calibrations(arguments)
    link = link_of(arguments, calibrations, has_roles=arguments.roles == _ALL)
    calibration = calibrations[0]
    work = _work(arguments, calibration)
    goal = Goal.of(arguments.slo, work)
    fixed = simulated_options(arguments)
    for each in calibrations:
        check_work(work, set_up(each, fixed).machine)
    if arguments.replicas is not None:
        return _size(arguments, calibrations, work, goal, fixed, link)
    space = Space.of(calibration, work, fixed, link=link)
    with meter(arguments.trials, "Searching") as shown:
        tuned = search(space, goal, work, limits=SearchLimits(arguments.trials, arguments.search_seed), progress=shown)
    print(f"{goal}\n")
    print_table(*trial_table(space, tuned))
    verified = _verify(arguments, work, goal, tuned, space)
    best = recommended(verified) if verified else tuned.best
    if verified:
        print("\nPredicted and measured:")
        print_table(*verified_table(space, verified))
    warnings = [*filter(None, [_beyond(space, work, tuned, best), tuned.default.metrics.thin_note])]
    notes = [*trust_notes(calibration), *_link_notes(arguments, calibrations, link), _searched(space, calibration)]
    print("\n" + "\n".join([recommendation(space, tuned, best, verified), *warnings, *notes]))
    if verified and best is tuned.default and not tuned.is_default_best:
        print("What was best in simulation was not clearly better than the default when it was measured.")
    if arguments.output_json is not None:
        write_json(arguments.output_json, tuned_json(space, goal, tuned, verified, best))
    if arguments.html is not None:
        page = tuned_page(space, goal, tuned, verified, best, title=_title(arguments), warnings=warnings, notes=notes)
        _write_page(arguments, page, calibration)
    return 0


def _title(arguments: argparse.Namespace) -> str:
    return Path(arguments.workload or arguments.traffic[0]).stem


def _write_page(arguments: argparse.Namespace, page: Page, calibration: Calibration) -> None:
    seeds = f"{arguments.work_seed} of the work, {arguments.search_seed} of the search"
    write_page(arguments, page, seed=seeds, machine=f"{calibration.model} on {calibration.device_name}, simulated")


def _check_engine_options(arguments: argparse.Namespace) -> None:
    """Check the options of the engine that verifies before minutes of searching. They are refused if nothing is
    verified."""
    EngineConfig.from_options(**engine_options(arguments))
    simulated = {*simulated_options(arguments), *_NOT_TAKEN}
    others = [flag.flag for flag in engine_flags() if hasattr(arguments, flag.name) and flag.name not in simulated]
    if others and not arguments.verify:
        raise ConfigError(f"{others[0]} is for the engine that --verify runs, and has no effect on a simulation.")


def _check_replicas(arguments: argparse.Namespace) -> None:
    if arguments.replicas is None:
        if arguments.router is not None:
            raise ConfigError("--router divides requests among several engines: give --replicas, e.g. 1-16.")
        if arguments.roles != TOGETHER:
            raise ConfigError("--roles are those of several engines: give --replicas, e.g. 1-16.")
    elif arguments.verify:
        raise ConfigError("--verify measures one engine in this process; it does not go with --replicas.")


def _calibrations(arguments: argparse.Namespace) -> list[Calibration]:
    """The given calibration, or several that differ in their ranks."""
    found = [load_calibration(name) for name in arguments.calibration]
    if len(found) > 1 and arguments.replicas is None:
        raise ConfigError("--calibration: several are compared with --replicas; without it, give one.")
    if len({(one.model, one.vocab_size) for one in found}) > 1:
        raise ConfigError("--calibration: several have to be of one model, in other numbers of ranks.")
    if len({one.tensor_parallel_size for one in found}) < len(found):
        raise ConfigError("--calibration: two have the same number of ranks (tensor_parallel_size); give one of them.")
    if arguments.verify and found[0].tensor_parallel_size > 1:
        raise ConfigError("--verify measures an engine on one device, and the calibration is that of several ranks.")
    return found


def _size(
    arguments: argparse.Namespace,
    calibrations: Sequence[Calibration],
    work: Sequence[BenchRequest],
    goal: Goal,
    fixed: dict[str, Any],
    link: Link,
) -> int:
    """Find how many replicas are enough, instead of the best options of one."""
    from headway_lab.sim.sim_report import trust_notes
    from headway_lab.tune.tune_report import fleet_json, fleet_page, fleet_recommendation, fleet_table
    from headway_lab.tune.tune_search import fewest_devices

    if goal.is_empty:
        raise ConfigError(
            "--replicas: how many are enough depends on what is promised. Give --slo, e.g. p99_ttft_ms=1000, or a "
            "workload whose classes have targets."
        )
    fleets, searched = [], ""
    for calibration in calibrations:
        fleet, space = _fewest(arguments, calibration, work, goal, fixed, link)
        fleets.append(fleet)
        searched = _searched(space, calibration)
    print(f"{goal}\n")
    for fleet in fleets:
        print_table(*fleet_table(fleet))
        print()
    best = fewest_devices(fleets)
    notes = [*trust_notes(calibrations[best]), *_link_notes(arguments, calibrations, link), searched]
    others = [line for place, fleet in enumerate(fleets) if place != best for line in fleet_recommendation(goal, fleet)]
    lines = fleet_recommendation(goal, fleets[best])
    if others:
        lines = [f"With the fewest devices: {lines[0]}", *lines[1:], *(f"Otherwise: {line}" for line in others)]
    print("\n".join([*lines, *notes]))
    if arguments.output_json is not None:
        told = [fleet_json(goal, fleet) for fleet in fleets]
        write_json(
            arguments.output_json,
            told[0] if len(told) == 1 else {"simulated": True, "recommended": told[best], "by_ranks": told},
        )
    if arguments.html is not None:
        page = fleet_page(goal, fleets[best], title=_title(arguments), notes=[*lines, *notes] if others else notes)
        _write_page(arguments, page, calibrations[best])
    return 0


def _fewest(
    arguments: argparse.Namespace,
    calibration: Calibration,
    work: Sequence[BenchRequest],
    goal: Goal,
    fixed: dict[str, Any],
    link: Link,
) -> tuple[Fleet, Space]:
    """Find the fewest machines of this calibration."""
    from headway.front.router import ROUTERS
    from headway_lab.tune import SearchLimits, Space
    from headway_lab.tune.tune_search import fewest, most_trials

    # The first of them is the default.
    routers = list(ROUTERS)[::-1] if arguments.router == _ALL else [arguments.router or "prefix-aware"]
    spaces = [
        Space.of(
            calibration,
            work,
            fixed,
            num_replicas=number,
            routers=routers,
            has_roles=arguments.roles == _ALL,
            link=link,
        )
        for number in arguments.replicas
    ]
    limits = SearchLimits(arguments.trials, arguments.search_seed)
    with meter(most_trials(spaces, limits), "Searching") as shown:
        return fewest(spaces, goal, work, limits=limits, progress=shown), spaces[-1]


def _link_notes(arguments: argparse.Namespace, calibrations: Sequence[Calibration], link: Link) -> list[str]:
    if arguments.roles == TOGETHER and all(one.tensor_parallel_size == 1 for one in calibrations):
        return []
    return [f"The link between devices is simulated, with {link.gb_s:g} GB/s and {1e6 * link.latency_s:g} µs."]


def _beyond(space: Space, work: Sequence[BenchRequest], tuned: Tuned, best: Trial) -> str:
    """A warning if the load is above the machine's capacity, with the default options and with the recommended ones."""
    from headway_lab.sim.sim_comparison import BEYOND, overload

    trials = {"by default": tuned.default, **({"as recommended": best} if best is not tuned.default else {})}
    told = []
    for name, trial in trials.items():
        most = partial(space.capacity, trial.options, work)
        if (found := overload(trial.metrics, most)) is not None:
            told.append(f"{found} {name}")
    return f"Beyond capacity: {'; '.join(told)}. {BEYOND}" if told else ""


def _searched(space: Space, calibration: Calibration) -> str:
    fixed = ", ".join(space.fixed) or "none"
    return (
        f"Searched: {', '.join(space.knobs)}; given: {fixed}. The block size stays at {calibration.block_size}: steps "
        "were measured with it, and what another changes in their time is not known."
    )


def _work(arguments: argparse.Namespace, calibration: Calibration) -> list[BenchRequest]:
    from headway_lab.sim.setup import with_oracle

    if bool(arguments.traffic) == bool(arguments.workload):
        raise ConfigError("Tuning needs requests: give --workload FILE.toml, or --traffic-log FILE.")
    if arguments.traffic:
        if arguments.rate is not None:
            raise ConfigError("--rate is for a workload; a traffic log is replayed as it was.")

        work = traffic_work(
            arguments.traffic,
            vocab_size=calibration.vocab_size,
            num_requests=arguments.requests,
            seed=arguments.work_seed,
        )
    else:
        work = draw_work(arguments, load_work(arguments), vocab_size=calibration.vocab_size, rate=arguments.rate)
    return with_oracle(work) if arguments.length_predictor == "oracle" else work


def _verify(
    arguments: argparse.Namespace, work: Sequence[BenchRequest], goal: Goal, tuned: Tuned, space: Space
) -> list[Verified]:
    """Measure on the real engine, if that is wanted and there are candidates."""
    if not arguments.verify or tuned.is_default_best:
        return []
    from headway.console.loading import load_engine, stderr_console
    from headway_lab.tune.tune_report import candidates, verify

    options: dict[str, Any] = engine_options(arguments)
    found, trials = [], candidates(tuned, arguments.verify)
    with meter(len(trials), "Measuring on the engine", unit="settings") as shown:
        for trial in trials:
            one = verify(
                trial,
                work,
                goal,
                options=options,
                load=lambda config: load_engine(config, stderr_console(), quiet=True, warm=True),
                temperature=_TEMPERATURE,
            )
            found.append(one)
            shown.advance()
    return found
