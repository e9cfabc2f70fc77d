"""`headway workload`: shows a workload file's requests as numbers and plots."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from headway.console.flags import count
from headway.console.output_files import check_writable
from headway_lab.charts.html_page import write_page
from headway_lab.workload.catalogue import add_workload_argument
from headway_lab.workload.rates import arrival_rate

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer


DEFAULT_VOCAB_SIZE = 32_000
"""The vocabulary of random ids, if there is no tokenizer that determines it."""
_LEAST_WIDTH, _MOST_WIDTH = 50, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_argument(parser, "file", "The workload.")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="Where data files are that the workload names, if they are not beside it.",
    )
    parser.add_argument("--requests", type=count(1), metavar="N", help="As many instead of the workload's own number.")
    parser.add_argument(
        "--rate",
        type=arrival_rate,
        metavar="R",
        help="Requests/s instead of the workload's own rate; a trace is stretched to it. inf: all at once.",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed for everything random. (default: 0)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Put a value over one of the file's, e.g. limits.max_input=2000. May be given several times.",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="For prompts of text: a folder with tokenizer.json, or a GGUF file. (default: the embedded model's)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write a page with charts, too.")
    parser.add_argument("--json", action="store_true", help="Print the numbers as JSON, without plots.")


def run(arguments: argparse.Namespace) -> int:
    from headway_lab.workload import load_workload, parse_overrides, statistics_of
    from headway_lab.workload.workload_report import text_report, workload_page

    check_writable(arguments.html)
    workload = load_workload(arguments.file, data_dir=arguments.data_dir, **parse_overrides(arguments.set))
    tokenizer = _load_tokenizer(arguments.tokenizer) if workload.needs_tokenizer else None
    work = workload.draw(
        vocab_size=tokenizer.vocab_size if tokenizer is not None else DEFAULT_VOCAB_SIZE,
        seed=arguments.seed,
        tokenizer=tokenizer,
        num_requests=arguments.requests,
        rate=arguments.rate,
    )
    statistics = statistics_of(work)
    if arguments.json:
        told = {"name": workload.name, "summary": workload.summary, "seed": arguments.seed, **statistics.as_json()}
        print(json.dumps(told, indent=2))
    else:
        width = min(_MOST_WIDTH, max(_LEAST_WIDTH, shutil.get_terminal_size().columns - 1))
        print(text_report(workload, work, statistics, width=width))
    if arguments.html is not None:
        page = workload_page(workload, work, statistics)
        write_page(arguments, page, seed=arguments.seed, machine="none: a description, nothing ran")
    return 0


def _load_tokenizer(source: str | None) -> Tokenizer:
    from headway.config import ModelConfig
    from headway.loader.chosen_model import load_model_tokenizer

    tokenizer = load_model_tokenizer(ModelConfig(tokenizer=source))
    assert tokenizer is not None  # the embedded model has one
    return tokenizer
