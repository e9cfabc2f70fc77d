"""`headway train-predictor`: trains a length predictor from a traffic log and writes it to a file."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.console.flags import number
from headway.console.output_files import check_writable
from headway.errors import ConfigError
from headway.predict.base import PromptView
from headway.predict.features import PromptFeatures
from headway.predict.predictors import LearnedRanker, RunningStatistics
from headway.predict.traffic_log import TrafficRecord
from headway.progress import meter
from headway_lab.predictor.training import Quality, quality

if TYPE_CHECKING:
    from rich.console import Console

    from headway.predict.traffic_log import TrafficRead
    from headway_lab.predictor.training import TrainedRanker


BATCH = 64
TIMING_REPEATS = 50
MADE_UP_WORD = "word "
MADE_UP_VOCABULARY = 32_000

EPILOG = """\
example:
  headway serve --traffic-log traffic.jsonl           # collect: a line per finished request
  headway train-predictor traffic.jsonl -o lengths.model
  headway serve --scheduling-policy ltr --length-predictor lengths.model

The requests that are held out are used for the printed numbers only. Kendall's tau says how well the order of the
answers' lengths is foreseen: 1 perfectly, 0 not at all. See docs/length_prediction.md.
"""
LEAST_HELD_OUT = 10


@dataclass(frozen=True)
class Cost:
    """Seconds per request, from token ids to a length: for one request at a time, and for 64 at once. Each is the
    median of many."""

    single_s: float
    batched_s: float


def compare(
    train: Sequence[TrafficRecord], held_out: Sequence[TrafficRecord], ranker: LearnedRanker
) -> dict[str, Quality]:
    """The quality of each predictor on held-out requests. Statistics see the training part once, in its order."""
    actual = [record.num_output_tokens for record in held_out]
    statistics = RunningStatistics()
    for record in train:
        statistics.observe_keys(record.features.keys, record.num_output_tokens)
    keys = [record.features.keys for record in held_out]
    return {
        "prompt length": quality([each.num_prompt_tokens for each in keys], actual),
        "running statistics": quality([statistics.predict_keys(each) for each in keys], actual),
        "learned ranker": quality(ranker.predict_features([record.features for record in held_out]), actual),
    }


def measure_cost(
    ranker: LearnedRanker, sample: Sequence[PromptFeatures], now: Callable[[], float] = time.perf_counter
) -> Cost:
    """Measure the cost on prompts as long as those of the sample, with text if these had it."""
    prompts = [_made_up(sample[i % len(sample)], i) for i in range(BATCH)]

    def timed(batch: Sequence[PromptView]) -> float:
        started_s = now()
        ranker.predict(batch)
        return now() - started_s

    ranker.predict(prompts)
    singles = sorted(timed([prompts[i % BATCH]]) for i in range(TIMING_REPEATS))
    batches = sorted(timed(prompts) for _ in range(TIMING_REPEATS // 5))
    return Cost(singles[len(singles) // 2], batches[len(batches) // 2] / BATCH)


def _made_up(like: PromptFeatures, number: int) -> PromptView:
    """A prompt of the same size, since logs need not hold the real tokens."""
    length = max(like.keys.num_prompt_tokens, 1)
    return PromptView(
        [(7919 * (number + 1) * (place + 3)) % MADE_UP_VOCABULARY for place in range(length)],
        max_tokens=like.keys.max_tokens,
        text=None if like.cues is None else MADE_UP_WORD * length,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    # Keeps the lines of the example apart.
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="A traffic log; several are read in turn.")
    parser.add_argument("--output", "-o", type=Path, required=True, metavar="FILE", help="Where to write the model.")
    parser.add_argument(
        "--held-out",
        type=number(),
        default=0.2,
        metavar="X",
        help="Share of requests to test on. (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Decides all that is drawn. (default: 0)")
    parser.add_argument(
        "--max-requests",
        type=int,
        default=100_000,
        metavar="N",
        help="Learn from at most this number of requests, the last ones of the logs. (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)

    from rich.console import Console

    from headway.predict.base import TrafficLogError
    from headway.predict.predictors import import_lightgbm
    from headway_lab.predictor.training import split_records

    import_lightgbm()  # known to be missing before minutes of reading
    logging.basicConfig(format="%(levelname)s: %(message)s")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    read = _read(arguments, console)
    train, held_out = split_records(read.records, arguments.held_out, arguments.seed)
    if len(held_out) < LEAST_HELD_OUT:
        raise TrafficLogError(
            f"Of {len(read.records)} usable requests {len(held_out)} are held out, too few to test on; "
            "collect more traffic, or raise --held-out."
        )
    started_s = time.monotonic()
    trained = _train(train, arguments.seed)
    _report(trained, train, held_out, time.monotonic() - started_s, console)
    _write(trained, arguments.output, console)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not 0.0 < arguments.held_out < 1.0:
        raise ConfigError(f"--held-out must be between 0 and 1, not {arguments.held_out:g}.")
    if arguments.max_requests < 1:
        raise ConfigError(f"--max-requests must be at least 1, not {arguments.max_requests}.")
    check_writable(arguments.output)


def _read(arguments: argparse.Namespace, console: Console) -> TrafficRead:
    from headway.predict.traffic_log import read_traffic

    with meter(None, "Reading", unit="lines") as shown:
        read = read_traffic(arguments.logs, most_records=arguments.max_requests, progress=shown.at)
    num_cut = sum(record.is_cut for record in read.records)
    console.print(
        f"{read.num_lines:,} rows: {len(read.records):,} used ({num_cut:,} of them cut at max_tokens), "
        f"{read.num_ended_early:,} aborted or failed, {read.num_bad:,} skipped as unreadable"
    )
    return read


def _train(records: Sequence[TrafficRecord], seed: int) -> TrainedRanker:
    from headway_lab.predictor.training import train_ranker

    with meter(None, "Training", unit="models") as shown:
        return train_ranker(records, seed=seed, progress=shown.at)


def _report(
    trained: TrainedRanker,
    train: Sequence[TrafficRecord],
    held_out: Sequence[TrafficRecord],
    seconds: float,
    console: Console,
) -> None:
    from headway.predict.predictors import LearnedRanker

    ranker = LearnedRanker(trained.model)
    taus = ", ".join(f"{name} {tau:.3f}" for name, tau in trained.tau_by_objective.items())
    console.print(
        f"Trained on {len(train):,} requests in {seconds:.1f} s. Kendall tau on held-back folds: {taus}; "
        f"taken: {trained.model.objective}, {trained.model.training['num_trees']} trees."
    )
    console.print(f"\nOn {len(held_out):,} requests that were held out:\n")
    console.print(_table(compare(train, held_out, ranker)))
    cost = measure_cost(ranker, [record.features for record in held_out])
    console.print(
        f"\nA prediction takes {1000 * cost.single_s:.3f} ms for one request, and {1000 * cost.batched_s:.3f} ms per "
        f"request for {BATCH} at once, on one thread."
    )


def _table(qualities: Mapping[str, Quality]) -> str:
    """A table in Markdown, which can be copied into a document."""
    lines = [
        "| predictor | Kendall tau | pairs in order | mean abs. log error | predicted / true tokens |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, each in qualities.items():
        # A prompt's length orders answers, but does not predict their lengths.
        lengths = "| – | – |" if name == "prompt length" else f"| {each.log_error:.3f} | {each.bias:.2f} |"
        lines.append(f"| {name} | {each.kendall_tau:.3f} | {100 * each.accuracy:.1f}% {lengths}")
    return "\n".join(lines)


def _write(trained: TrainedRanker, path: Path, console: Console) -> None:
    from headway.predict.ranker_file import save_ranker

    save_ranker(trained.model, path)
    console.print(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
