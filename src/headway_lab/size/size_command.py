"""`headway size`: how many devices a model needs for a load, by simulation: with nothing but a config.json, if need be.

The machine is a device that is known by name, one that is described by its data sheet, or a calibration. The work is a
workload file, a trace, or a rate and lengths. The answer has the replicas, the command that starts them, the latencies
to expect, how much more load they take, the price, and what would halve it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.console.flags import FlagSpec, add_flags, chosen, count, engine_flags, number
from headway.console.output_files import check_writable, print_table
from headway.errors import ConfigError, ModelError
from headway.progress import meter
from headway_lab.bench.pricing import add_price_flag
from headway_lab.charts.html_page import write_page
from headway_lab.sim.sim_flags import add_rate_flag, add_work_flags, draw_work, load_work, simulated_flags
from headway_lab.workload.input_files import MOST_TOKENS
from headway_lab.workload.workload_command import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    from headway_lab.sim.calibration import Calibration
    from headway_lab.size.data_sheets import DataSheet
    from headway_lab.size.deployment import Target
    from headway_lab.size.rates import Load
    from headway_lab.size.sizing import Effort
    from headway_lab.workload.bench_requests import BenchRequest
    from headway_lab.workload.workload import Workload

_SHEET = ("bandwidth_gb_s", "tflops", "memory_gb", "fp8_tflops")
_MODEL = ("dtype", "quantization", "max_model_len")
_OWN = "device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("model and machine")
    machine.add_argument(
        "--model",
        metavar="MODEL",
        help="A folder with a config.json, such a file, or a built-in shape. Weights are not read. (default: that of "
        "the calibration)",
    )
    machine.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="A known device (h200, h100, a100-80, l40s, l4, rtx4090, mi300x, …), or a calibration: its name or file. "
        "A device that is calibrated for the model is simulated by that, any other by its data sheet.",
    )
    sheet = machine.add_argument
    sheet("--bandwidth-gb-s", type=number(1e-3, 1e6), metavar="X", help="Data sheet: memory bandwidth in 10^9 bytes/s.")
    sheet("--tflops", type=number(1e-3, 1e6), metavar="X", help="Data sheet: dense bfloat16, in 10^12 flops/s.")
    sheet("--fp8-tflops", type=number(1e-3, 1e6), metavar="X", help="Data sheet: dense float8. (default: none)")
    sheet("--memory-gb", type=number(1e-3, 1e6), metavar="X", help="Data sheet: memory in GiB.")
    machine.add_argument(
        "--tensor-parallel-size",
        type=count(1, 64),
        metavar="N",
        help="Devices that share each model. (default: the fewest of 1, 2, 4 and 8 that hold it and can keep the "
        "promises)",
    )
    add_price_flag(parser)
    add_rate_flag(parser)
    parser.add_argument("--trace", metavar="FILE", help="Requests of a recorded trace: see docs/workloads.md.")
    lengths = count(1, MOST_TOKENS)
    parser.add_argument("--input-len", type=lengths, metavar="N", help="Tokens of each prompt, with --rate.")
    parser.add_argument("--output-len", type=lengths, metavar="N", help="Tokens of each answer.")
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="KEY=MS",
        help="What every request is promised, e.g. p99_itl_ms=50 or p99_ttft_ms=1000. May be given several times. "
        "(default: what the workload's classes promise, else p99_itl_ms=100 p50_ttft_ms=2000)",
    )
    parser.add_argument(
        "--trials",
        type=count(0, 10_000),
        default=4,
        metavar="N",
        help="Simulations of the search for better options. (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--html", metavar="FILE", help="Write a page with charts here.")
    add_work_flags(parser, is_required=False)
    add_flags(parser, _engine_flags())


def _engine_flags() -> list[FlagSpec]:
    model = [flag for flag in engine_flags() if flag.name in _MODEL]
    return [*model, *simulated_flags()]


def run(arguments: argparse.Namespace) -> int:
    """A model that cannot be read is a wrong option here: nothing of it is loaded."""
    try:
        return _run(arguments)
    except ModelError as error:
        raise ConfigError(f"--model: {error}") from error


def _run(arguments: argparse.Namespace) -> int:
    from headway_lab.size.accuracy import measured_accuracy
    from headway_lab.size.improvements import improvements
    from headway_lab.size.size_report import Answer, answer_json, described
    from headway_lab.size.sizing import size
    from headway_lab.tune import Goal

    check_writable(arguments.html)
    Goal.parse(arguments.slo)  # refuses what cannot be promised, before anything is drawn
    workload = _workload(arguments)
    workload.check_data()
    effort = _effort(arguments)
    drawn = draw_work(arguments, workload, vocab_size=DEFAULT_VOCAB_SIZE, rate=arguments.rate)
    rate = _rate(arguments, drawn)
    target = _target(arguments, longest=max(one.num_prompt_tokens + one.num_output_tokens for one in drawn))
    load = _load(arguments, workload, drawn)
    with meter(effort.num_trials or None, "Sizing") as shown:
        sizing = size(target, load, rate, given_ranks=arguments.tensor_parallel_size, effort=effort, progress=shown)
    with meter(None, "Comparing") as shown:
        found = improvements(sizing, effort=effort, progress=shown)
    answer = Answer(
        sizing,
        found,
        arguments.price_per_hour,
        measured_accuracy(),
        described(sizing.trial.metrics, rate, _title(arguments)),
        str(load.goal(drawn)),
    )
    if arguments.json:
        print(json.dumps(answer_json(answer), indent=2))
    else:
        _print(answer)
    if arguments.html is not None:
        from headway_lab.size.size_report import answer_page

        machine = f"{sizing.deployment.target.model} on {sizing.deployment.device_name}, simulated"
        write_page(arguments, answer_page(answer), seed=arguments.work_seed, machine=machine)
    return 0


def _print(answer: Any) -> None:
    from headway_lab.size.size_report import (
        halving_text,
        headroom_text,
        improvement_table,
        percentile_table,
        price_lines,
        text_report,
        trust_lines,
    )

    print("\n".join(text_report(answer)) + "\n")
    print_table(*percentile_table(answer.sizing.trial.metrics))
    print("\n" + "\n".join([headroom_text(answer), *price_lines(answer), "", halving_text(answer)]))
    if answer.improvements:
        print_table(*improvement_table(answer))
    print("\n" + "\n".join(trust_lines(answer)))


def _effort(arguments: argparse.Namespace) -> Effort:
    from headway_lab.size.sizing import Effort

    given = {} if arguments.requests is None else {"num_requests": arguments.requests}
    return Effort(num_trials=arguments.trials, **given)


def _workload(arguments: argparse.Namespace) -> Workload:
    """The work that the flags describe; exactly one way has to be given."""
    from headway_lab.workload import parse_overrides
    from headway_lab.workload.workload_file import workload_from_options

    has_lengths = arguments.input_len is not None or arguments.output_len is not None
    if sum([arguments.workload is not None, arguments.trace is not None, has_lengths]) != 1:
        raise ConfigError(
            "Sizing needs requests: give --workload WORKLOAD, --trace FILE, or --input-len and --output-len."
        )
    if arguments.workload is not None:
        return load_work(arguments)
    overrides = parse_overrides(arguments.set)
    if arguments.trace is not None:
        return workload_from_options({**overrides, "trace": {"file": arguments.trace}}, data_dir=arguments.data_dir)
    if arguments.input_len is None or arguments.output_len is None or arguments.rate is None:
        raise ConfigError("--input-len, --output-len and --rate describe the work together: give all three.")
    arrivals = {"kind": "poisson", "rate": 1.0}
    own = {"input": arguments.input_len, "output": arguments.output_len, "arrivals": arrivals, "requests": 500}
    return workload_from_options({**own, **overrides})


def _rate(arguments: argparse.Namespace, work: list[BenchRequest]) -> float:
    """The load to size for."""
    from headway_lab.bench.timelines import RequestTimeline, offered_rate

    if arguments.rate is not None:
        if math.isinf(arguments.rate):
            raise ConfigError("--rate inf: a load to size for is a number of requests/s.")
        return float(arguments.rate)
    offered = offered_rate(
        [RequestTimeline(one.arrival_s, one.num_prompt_tokens, one.num_output_tokens) for one in work]
    )
    if offered is None:
        raise ConfigError("All requests of this work are there at once: say with --rate how many come in a second.")
    return offered


def _target(arguments: argparse.Namespace, *, longest: int) -> Target:
    from headway_lab.size.data_sheets import device_calibrated_as
    from headway_lab.size.deployment import Target

    sheet, calibration = _machine(arguments)
    model = arguments.model or (calibration.model if calibration is not None else None)
    if model is None:
        raise ConfigError("Name the model: --model with a folder that has a config.json, or a built-in shape.")
    if calibration is not None and model != calibration.model:
        raise ConfigError(
            f"The calibration '{arguments.machine}' is of {calibration.model}, not of {model}: name the device "
            "instead, e.g. --machine h200."
        )
    if calibration is not None:
        sheet = device_calibrated_as(calibration.device_name)
    return Target(
        model,
        chosen(arguments, _engine_flags()),
        sheet,
        calibration,
        uses_calibrations=all(getattr(arguments, name) is None for name in _SHEET),
        longest=longest,
    )


def _machine(arguments: argparse.Namespace) -> tuple[DataSheet | None, Calibration | None]:
    """The device, or the calibration."""
    import dataclasses

    from headway_lab.sim.calibration import Calibration, shipped_machines
    from headway_lab.size.data_sheets import DataSheet, find_device, known_device

    given = {name: getattr(arguments, name) for name in _SHEET if getattr(arguments, name) is not None}
    name = arguments.machine
    if name is None:
        missing = [f"--{each.replace('_', '-')}" for each in _SHEET[:3] if each not in given]
        if missing:
            raise ConfigError(
                "Name the machine: --machine with a known device or a calibration, or its data sheet: "
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
            )
        return DataSheet(_OWN, **given), None
    if known_device(name) is not None:
        return dataclasses.replace(find_device(name), **given), None
    names = tuple(shipped_machines())
    if name in names or Path(name).suffix or Path(name).exists():
        if given:
            flag = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{flag} is of a data sheet, and '{name}' is a calibration: give one of the two.")
        return None, Calibration.find(name)
    return find_device(name, others=names), None


def _load(arguments: argparse.Namespace, workload: Workload, drawn: list[BenchRequest]) -> Load:
    from headway_lab.bench.online_metrics import SARATHI
    from headway_lab.size.rates import Load
    from headway_lab.tune import Goal

    promises = list(arguments.slo)
    if not promises and Goal.of([], drawn).is_empty:
        promises = list(SARATHI)

    @functools.lru_cache(maxsize=8)
    def draw(number: int, rate: float) -> list[BenchRequest]:
        wanted = argparse.Namespace(**{**vars(arguments), "requests": number})
        return draw_work(wanted, workload, vocab_size=DEFAULT_VOCAB_SIZE, rate=rate)

    return Load(draw, promises)


def _title(arguments: argparse.Namespace) -> str:
    if arguments.workload or arguments.trace:
        return Path(arguments.workload or arguments.trace).stem
    return "Equal requests"
