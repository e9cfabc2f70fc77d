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
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headway.config import EngineConfig
from headway.console.flags import add_flags, count, engine_flags, number, positive
from headway.console.output_files import check_writable, print_table, write_json
from headway.errors import ConfigError
from headway.front.roles import TOGETHER
from headway.progress import meter
from headway_lab.sim.sim_flags import (
    PREDICTORS,
    add_calibration_flag,
    add_link_flags,
    add_rate_flag,
    add_work_flags,
    draw_work,
    engine_options,
    link_of,
    load_work,
    simulated_options,
)

if TYPE_CHECKING:
    from headway_lab.sim.calibration import Calibration
    from headway_lab.tune.asked import Asked
    from headway_lab.tune.cost_report import Searched
    from headway_lab.tune.cost_search import Load
    from headway_lab.tune.tune_report import Verified
    from headway_lab.tune.tune_search import Space, Trial, Tuned
    from headway_lab.workload.bench_requests import BenchRequest


ALL = "all"
GOODPUT, COST = "goodput", "cost"
_TRIALS = {GOODPUT: 40, COST: 80}
_TEMPERATURE = 1.0
_KV_FORMATS = ("int8", "fp8")
"""KV formats that are searched for the lowest price. int4 changes answers more, so it has to be asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from headway_lab.sim.kv_variant import KV_FORMATS

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
        "--objective",
        choices=(GOODPUT, COST),
        default=GOODPUT,
        help="goodput: the most requests a second that get what is promised. cost: the lowest price per output token, "
        "at the highest load that keeps --slo; with --replicas the cheapest devices for the given load. "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--price-per-hour",
        type=positive,
        action="append",
        default=[],
        metavar="X",
        help="What one device (a GPU; without one, the machine) costs for an hour, in any currency. Given once, it is "
        "that of all; or give it for each --calibration, in their order.",
    )
    parser.add_argument(
        "--kv-formats",
        metavar="LIST",
        help=f"KV formats to search beside the calibrated one: {', '.join(KV_FORMATS)}; none. They change answers. "
        f"(default: none; for cost {','.join(_KV_FORMATS)})",
    )
    parser.add_argument(
        "--acceptance",
        type=number(1.0, 9.0, is_above=True),
        metavar="X",
        help="Search --speculation too: the mean number of tokens that a step with guesses brings a request.",
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
        choices=(*ROUTERS, ALL),
        help="With --replicas: how requests are divided among them. all: whichever is best. (default: prefix-aware)",
    )
    parser.add_argument(
        "--roles",
        choices=(TOGETHER, ALL),
        default=TOGETHER,
        help="With --replicas: whether all replicas do both, or also every number of prefill replicas beside decode "
        "replicas is tried. (default: %(default)s)",
    )
    add_link_flags(parser)
    parser.add_argument(
        "--trials",
        type=count(1),
        metavar="N",
        help="Number of simulations of the whole work; those of a part count as that part. With --replicas: for each "
        "number whose options are searched; with several calibrations: for each. (default: "
        f"{_TRIALS[GOODPUT]}, for cost {_TRIALS[COST]})",
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
    from headway_lab.tune.asked import Asked, machines_of
    from headway_lab.tune.formats import Formats, parse_kv_formats
    from headway_lab.tune.possible import check_possible
    from headway_lab.tune.tune_goal import Goal

    check_writable(arguments.output_json, arguments.html)
    Goal.parse(arguments.slo)  # refuses what cannot be promised, before anything is drawn
    is_cost = arguments.objective == COST
    formats = Formats(
        parse_kv_formats(arguments.kv_formats, default=_KV_FORMATS if is_cost else ()), arguments.acceptance or 0.0
    )
    _check_engine_options(arguments)
    _check_replicas(arguments)
    machines = machines_of(arguments.calibration, arguments.price_per_hour)
    calibrations = [machine.calibration for machine in machines]
    _check_cost(arguments)
    _check_calibrations(arguments, calibrations)
    link = link_of(arguments, calibrations, has_roles=arguments.roles == ALL)
    work = _work(arguments, calibrations[0])
    goal = Goal.of(arguments.slo, work)
    if is_cost and goal.is_empty:
        raise ConfigError(
            "--objective cost: without promises the cheapest is to let all requests wait. Give --slo, e.g. "
            "p99_ttft_ms=1000, or a workload whose classes have targets."
        )
    fixed = simulated_options(arguments)
    for each in calibrations:
        check_work(work, set_up(each, fixed).machine)
    if arguments.trials is None:
        arguments.trials = _TRIALS[arguments.objective]
    asked = Asked(arguments, machines, work, goal, fixed, link, formats)
    check_possible([asked.space(machine) for machine in machines], goal, work)
    if arguments.replicas is not None:
        from headway_lab.tune.fleet_command import run_fleet

        return run_fleet(asked)
    return _cost(asked) if is_cost else _goodput(asked)


def _goodput(asked: Asked) -> int:
    """Find the options with the most good requests each second."""
    from headway_lab.tune import search
    from headway_lab.tune.ablation import GOODPUT, gains_of
    from headway_lab.tune.tune_report import (
        candidates,
        recommendation,
        recommended,
        trial_table,
        tuned_json,
        tuned_page,
        verified_table,
    )
    from headway_lab.tune.tune_search import simulate_trial

    arguments, goal, work, (machine,) = asked.arguments, asked.goal, asked.work, asked.machines
    space = asked.space(machine)
    with meter(arguments.trials, "Searching") as shown:
        tuned = search(space, goal, work, limits=asked.limits, progress=shown)
    print(f"{goal}\n")
    print_table(*trial_table(space, tuned))
    trials = [] if tuned.is_default_best else candidates(tuned, arguments.verify)
    verified = _verify(asked, trials, space, lambda trial: work)
    best = recommended(verified) if verified else tuned.best
    if verified:
        print("\nPredicted and measured:")
        print_table(*verified_table(space, verified))
    gains = gains_of(space, best, lambda options: simulate_trial(space, goal, options, work), GOODPUT)
    if gains is not None:
        print(f"\n{gains.title}:")
        print_table(*gains.table())
    warnings = [*filter(None, [_beyond(space, work, tuned, best), tuned.default.metrics.thin_note])]
    prices = [] if best.metrics.prices is None else [best.metrics.prices.note]
    notes = [*prices, *asked.notes(space)]
    print("\n" + "\n".join([recommendation(space, tuned, best, verified), *warnings, *notes]))
    if verified and best is tuned.default and not tuned.is_default_best:
        print("What was best in simulation was not clearly better than the default when it was measured.")
    if arguments.output_json is not None:
        write_json(arguments.output_json, tuned_json(space, goal, tuned, verified, best, gains=gains))
    if arguments.html is not None:
        page = tuned_page(
            space, goal, tuned, verified, best, title=asked.title, gains=gains, warnings=warnings, notes=notes
        )
        asked.write_page(page, machine.calibration)
    return 0


def _cost(asked: Asked) -> int:
    """Find the options with the lowest price per token."""
    from headway_lab.tune.cost_command import run_cost
    from headway_lab.tune.cost_search import Load
    from headway_lab.tune.tune_report import candidates

    def verify_best(load: Load, found: Searched) -> list[Verified]:
        if found.tuned is None or found.tuned.is_default_best:
            return []
        trials = [trial for trial in candidates(found.tuned, asked.arguments.verify) if trial.rate is not None]
        return _verify(asked, trials, found.space, lambda trial: load.at(trial.rate or load.rate))

    return run_cost(asked, Load(asked.work, _rate_of(asked.arguments, asked.work)), verify_best)


def _rate_of(arguments: argparse.Namespace, work: Sequence[BenchRequest]) -> float:
    """The rate at which the work of a search for the highest rate arrives."""
    from headway_lab.tune.cost_search import UNIT_RATE

    if not arguments.traffic:
        return UNIT_RATE
    span_s = max(request.arrival_s for request in work)
    if span_s <= 0:
        raise ConfigError("--objective cost: all requests of the traffic log arrived at once, so they have no rate.")
    return (len(work) - 1) / span_s


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
        if len(arguments.calibration) > 1 and arguments.objective != COST:
            raise ConfigError(
                "--calibration: several are compared with --replicas or --objective cost; without, give one."
            )
        if arguments.router is not None:
            raise ConfigError("--router divides requests among several engines: give --replicas, e.g. 1-16.")
        if arguments.roles != TOGETHER:
            raise ConfigError("--roles are those of several engines: give --replicas, e.g. 1-16.")
    elif arguments.verify:
        raise ConfigError("--verify measures one engine in this process; it does not go with --replicas.")


def _check_cost(arguments: argparse.Namespace) -> None:
    if arguments.objective != COST:
        return
    if not arguments.price_per_hour:
        raise ConfigError("--objective cost: what a token costs follows from what a device costs: --price-per-hour.")
    if arguments.replicas is None and arguments.rate is not None:
        raise ConfigError(
            "--objective cost finds the highest rate that one machine takes. Leave --rate out, or give --replicas to "
            "find the cheapest for this rate."
        )


def _check_calibrations(arguments: argparse.Namespace, found: Sequence[Calibration]) -> None:
    if arguments.verify and (len(found) > 1 or found[0].tensor_parallel_size > 1):
        raise ConfigError("--verify measures one engine on one device: give its calibration alone.")


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


def _work(arguments: argparse.Namespace, calibration: Calibration) -> list[BenchRequest]:
    from headway_lab.sim.setup import with_oracle
    from headway_lab.tune.cost_search import UNIT_RATE
    from headway_lab.tune.traffic_work import traffic_work

    if bool(arguments.traffic) == bool(arguments.workload):
        raise ConfigError("Tuning needs requests: give --workload WORKLOAD, or --traffic-log FILE.")
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
        is_at_any_rate = arguments.objective == COST and arguments.replicas is None
        rate = UNIT_RATE if is_at_any_rate else arguments.rate
        work = draw_work(arguments, load_work(arguments), vocab_size=calibration.vocab_size, rate=rate)
    return with_oracle(work) if arguments.length_predictor == "oracle" else work


def _verify(
    asked: Asked, trials: Sequence[Trial], space: Space, work_of: Callable[[Trial], Sequence[BenchRequest]]
) -> list[Verified]:
    """Measure these trials on the real engine, if that is wanted."""
    if not asked.arguments.verify or not trials:
        return []
    from headway.console.loading import load_engine, stderr_console
    from headway_lab.tune.tune_report import verify

    found, options = [], engine_options(asked.arguments)
    with meter(len(trials), "Measuring on the engine", unit="settings") as shown:
        for trial in trials:
            one = verify(
                trial,
                work_of(trial),
                asked.goal,
                options={**options, **space.of_engine(trial.options)},
                load=lambda config: load_engine(config, stderr_console(), quiet=True, warm=True),
                temperature=_TEMPERATURE,
            )
            found.append(one)
            shown.advance()
    return found
