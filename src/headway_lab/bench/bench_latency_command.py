"""`headway bench latency`: how long one batch of equal requests takes. Flags and result keys are those of vLLM's."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

from headway.console.flags import count
from headway_lab.bench.offline_bench import (
    LATENCY_MEASURES,
    LATENCY_SCENARIOS,
    Job,
    add_common_flags,
    chosen_scenario,
    either,
    run_job,
    values_json,
)
from headway_lab.bench.timelines import RoundTimes, best_of, percentile
from headway_lab.workload.bench_requests import BenchRequest, LengthRange, draw_work

_FIXED_BY_SCENARIO = ("input_len", "output_len", "batch_size", "n")
_PERCENTILES = (10, 25, 50, 75, 90, 99)
_INPUT_LEN, _OUTPUT_LEN, _BATCH_SIZE, _N = 32, 128, 8, 1
_NUM_ITERS, _NUM_ITERS_WARMUP = 30, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, default, text in (
        ("--input-len", _INPUT_LEN, "Tokens of each prompt."),
        ("--output-len", _OUTPUT_LEN, "Tokens to generate for each."),
        ("--batch-size", _BATCH_SIZE, "Requests in the batch."),
        ("--n", _N, "Completions of each prompt."),
    ):
        parser.add_argument(flag, type=count(1), metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--num-iters",
        "--rounds",
        type=count(1),
        metavar="N",
        help=f"How often the batch is measured. (default: {_NUM_ITERS}; with a scenario 3)",
    )
    parser.add_argument(
        "--num-iters-warmup",
        "--warmup-rounds",
        type=count(0),
        metavar="N",
        help=f"How often it runs unmeasured before. (default: {_NUM_ITERS_WARMUP}; with a scenario 1)",
    )
    add_common_flags(parser, LATENCY_SCENARIOS)


def run(arguments: argparse.Namespace) -> int:
    scenario = chosen_scenario(arguments, _FIXED_BY_SCENARIO)

    def draw(seed: int, vocab_size: int) -> list[BenchRequest]:
        if scenario is not None:
            return scenario.draw(seed, vocab_size)
        return draw_work(
            random.Random(seed),
            either(arguments.batch_size, _BATCH_SIZE),
            input_len=LengthRange.exactly(either(arguments.input_len, _INPUT_LEN)),
            output_len=LengthRange.exactly(either(arguments.output_len, _OUTPUT_LEN)),
            vocab_size=vocab_size,
            num_choices=either(arguments.n, _N),
        )

    num_iters, num_warmup = (
        (_NUM_ITERS, _NUM_ITERS_WARMUP) if scenario is None else (scenario.num_rounds, scenario.num_warmup_rounds)
    )
    job = Job(
        title="headway bench latency" + (f" · {scenario.name}" if scenario is not None else ""),
        draw=draw,
        scenario=scenario,
        num_rounds=either(arguments.num_iters, num_iters),
        num_warmup_rounds=either(arguments.num_iters_warmup, num_warmup),
        measures=LATENCY_MEASURES,
        result=latency_result,
    )
    return run_job(arguments, job)


def latency_result(rounds: Sequence[RoundTimes]) -> dict[str, Any]:
    """vLLM's keys are over all rounds; ours, beside them, of the best one."""
    latencies = [times.elapsed_s for times in rounds]
    best = best_of(rounds)
    return {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": {str(percent): percentile(latencies, percent) for percent in _PERCENTILES},
        **values_json(LATENCY_MEASURES, best),
        "ms_per_token_with_prompt": 1000 * best.elapsed_per_token_s,
    }
