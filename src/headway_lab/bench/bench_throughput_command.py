"""`headway bench throughput`: how fast many requests get done. Flags and result keys are those of vLLM's."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from typing import Any

from headway.console.flags import count, number
from headway.errors import ConfigError
from headway_lab.bench.offline_bench import (
    SCENARIOS,
    THROUGHPUT_MEASURES,
    Job,
    add_common_flags,
    chosen_scenario,
    either,
    run_job,
)
from headway_lab.bench.timelines import RoundTimes, best_of
from headway_lab.workload.bench_requests import BenchRequest, LengthRange, TraceLimits, draw_work

DATASETS = ("random",)
_FIXED_BY_SCENARIO = ("dataset_name", "input_len", "output_len", "num_prompts", "random_range_ratio")
_INPUT_LEN, _OUTPUT_LEN, _NUM_PROMPTS, _RANGE_RATIO = 1024, 128, 1000, 0.0
_NUM_ROUNDS, _NUM_WARMUP_ROUNDS = 3, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-name", choices=DATASETS, help="Where prompts come from. (default: random)")
    for flag, default, text in (
        ("--input-len", _INPUT_LEN, "Tokens of each prompt."),
        ("--output-len", _OUTPUT_LEN, "Tokens to generate for each."),
        ("--num-prompts", _NUM_PROMPTS, "Requests, all submitted at once."),
    ):
        parser.add_argument(flag, type=count(1), metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--random-range-ratio",
        type=number(),
        metavar="R",
        help=f"Lengths are drawn from length × (1 - R) to length × (1 + R), 0 ≤ R < 1. (default: {_RANGE_RATIO:g})",
    )
    parser.add_argument(
        "--rounds",
        type=count(1),
        metavar="N",
        help=f"How often the work is measured; the best counts. (default: {_NUM_ROUNDS}; scenario online 1)",
    )
    parser.add_argument(
        "--warmup-rounds",
        type=count(0),
        metavar="N",
        help=f"How often it runs unmeasured before. (default: {_NUM_WARMUP_ROUNDS})",
    )
    parser.add_argument("--trace", metavar="FILE.csv", help="What the scenario 'online' replays.")
    parser.add_argument(
        "--speedup",
        type=number(),
        metavar="X",
        help=f"Arrival times of the trace are divided by this. (default: {TraceLimits.speedup:g})",
    )
    add_common_flags(parser, tuple(SCENARIOS))


def run(arguments: argparse.Namespace) -> int:
    scenario = chosen_scenario(arguments, _FIXED_BY_SCENARIO)
    _check(arguments)

    def draw(seed: int, vocab_size: int) -> list[BenchRequest]:
        if scenario is not None:
            speedup = either(arguments.speedup, TraceLimits.speedup)
            return scenario.draw(seed, vocab_size, trace=arguments.trace, speedup=speedup)
        ratio = either(arguments.random_range_ratio, _RANGE_RATIO)
        return draw_work(
            random.Random(seed),
            either(arguments.num_prompts, _NUM_PROMPTS),
            input_len=LengthRange.around(either(arguments.input_len, _INPUT_LEN), ratio),
            output_len=LengthRange.around(either(arguments.output_len, _OUTPUT_LEN), ratio),
            vocab_size=vocab_size,
        )

    num_rounds, num_warmup = (
        (_NUM_ROUNDS, _NUM_WARMUP_ROUNDS) if scenario is None else (scenario.num_rounds, scenario.num_warmup_rounds)
    )
    job = Job(
        title="headway bench throughput" + (f" · {scenario.name}" if scenario is not None else ""),
        draw=draw,
        scenario=scenario,
        num_rounds=either(arguments.rounds, num_rounds),
        num_warmup_rounds=either(arguments.warmup_rounds, num_warmup),
        measures=THROUGHPUT_MEASURES,
        result=throughput_result,
    )
    return run_job(arguments, job)


def throughput_result(rounds: Sequence[RoundTimes]) -> dict[str, Any]:
    """vLLM's keys and ours, for the best round."""
    best = best_of(rounds)
    return {
        "elapsed_time": best.elapsed_s,
        "num_requests": best.num_requests,
        "total_num_tokens": best.num_input_tokens + best.num_output_tokens,
        "requests_per_second": best.requests_s,
        "tokens_per_second": best.total_tok_s,
        "output_tok_s": best.output_tok_s,
        "input_tok_s": best.input_tok_s,
    }


def _check(arguments: argparse.Namespace) -> None:
    ratio = either(arguments.random_range_ratio, _RANGE_RATIO)
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, not {ratio:g}.")
    speedup = either(arguments.speedup, TraceLimits.speedup)
    if not 0 < speedup < math.inf:
        raise ConfigError(f"--speedup must be above 0, not {speedup:g}.")
    is_online = arguments.scenario is not None and SCENARIOS[arguments.scenario].is_online
    if is_online and arguments.trace is None:
        raise ConfigError(f"The scenario '{arguments.scenario}' replays a trace: name the file with --trace.")
    for flag in ("trace", "speedup"):
        if getattr(arguments, flag) is not None and not is_online:
            raise ConfigError(f"--{flag} belongs to the scenario 'online'.")
