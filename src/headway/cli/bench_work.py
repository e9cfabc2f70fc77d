"""Flags that say which requests are sent, and how the outcome is judged: the same for every benchmark under load."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from headway.bench.datasets import CustomDataset, Dataset, Draw, RandomDataset, WorkloadDataset
from headway.bench.online_metrics import SHOWN_PERCENTILES
from headway.bench.slo import Targets
from headway.bench.targets import Judging
from headway.cli.counts import count
from headway.errors import ConfigError
from headway.workload.requests import LengthRange

DATASETS = ("random", "custom", "workload")
_NUM_PROMPTS, _INPUT_LEN, _OUTPUT_LEN, _CUSTOM_OUTPUT_LEN = 1000, 1024, 128, 256
_TARGETS = ("ttft", "tpot", "e2el")


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    """Which requests."""
    group = parser.add_argument_group("work")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="random: token ids; custom: a JSONL file with a 'prompt' (text or ids) and perhaps 'output_tokens' in "
        "each line, or ShareGPT's 'conversations'; workload: a TOML file. (default: random)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="The file of the dataset.")
    group.add_argument(
        "--workload", metavar="FILE.toml", help="The same as --dataset-name workload --dataset-path FILE.toml."
    )
    group.add_argument("--data-dir", metavar="DIR", help="Where the files are that the workload names.")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Another value for a key of the workload, e.g. limits.max_input=2000. May be given several times.",
    )
    group.add_argument(
        "--num-prompts",
        type=count(1),
        metavar="N",
        help=f"How many requests. (default: {_NUM_PROMPTS}; of a file, as many as it has)",
    )
    group.add_argument(
        "--random-input-len", type=count(1), default=_INPUT_LEN, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--random-output-len", type=count(1), default=_OUTPUT_LEN, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths are drawn from length × (1 - R) to length × (1 + R), 0 ≤ R < 1. (default: 0)",
    )
    group.add_argument(
        "--custom-output-len",
        type=count(1),
        default=_CUSTOM_OUTPUT_LEN,
        metavar="N",
        help="Of lines without 'output_tokens'. (default: %(default)s)",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="X",
        help="Shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, less comes in "
        "bursts, more is evener. A workload has its own. (default: 1)",
    )


def add_judging_flags(parser: argparse.ArgumentParser) -> None:
    """What counts as good."""
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="What a request is promised: ttft:500 tpot:50 e2el:10000. The goodput is the rate of requests that got "
        "all of it. (default: what the workload's classes promise)",
    )


def dataset_of(arguments: argparse.Namespace) -> Dataset:
    """The dataset that the flags name."""
    name = arguments.dataset_name or ("workload" if arguments.workload else "random")
    path = arguments.workload or arguments.dataset_path
    if arguments.workload and (name != "workload" or arguments.dataset_path):
        raise ConfigError("--workload is a dataset of its own; give it without --dataset-name and --dataset-path.")
    if name == "random":
        if path is not None:
            raise ConfigError("--dataset-path goes with --dataset-name custom or workload.")
        return _random_dataset(arguments)
    if path is None:
        raise ConfigError(f"--dataset-name {name} needs the file: --dataset-path FILE.")
    if name == "custom":
        return CustomDataset(Path(path), arguments.custom_output_len)

    from headway.workload import load_workload, parse_overrides

    return WorkloadDataset(load_workload(path, data_dir=arguments.data_dir, **parse_overrides(arguments.set)))


def draw_of(arguments: argparse.Namespace, *, rate: float, seed: int, num_requests: int | None = None) -> Draw:
    """How much of it, and when. An engine in this process brings the tokenizer itself."""
    tokenizer = None
    if getattr(arguments, "tokenizer", None) is not None:
        from headway.config import ModelConfig
        from headway.server.tokenizer_source import load_front_end_tokenizer

        tokenizer = load_front_end_tokenizer(ModelConfig(tokenizer=arguments.tokenizer))
    return Draw(num_requests or arguments.num_prompts, rate, arguments.burstiness, seed, tokenizer=tokenizer)


def judging_of(arguments: argparse.Namespace, percents: Sequence[float] = SHOWN_PERCENTILES) -> Judging:
    """From --goodput."""
    return Judging(parse_goodput(arguments.goodput), percents)


def parse_goodput(texts: Sequence[str]) -> Targets | None:
    """`None` if nothing is promised."""
    if not texts:
        return None
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        value = _number(number)
        if name not in _TARGETS or value is None or not 0 < value < math.inf:
            names = ", ".join(_TARGETS)
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS with one of {names}, not '{text}'.")
        found[name] = value / 1000
    return Targets(found.get("ttft"), found.get("tpot"), found.get("e2el"))


def rate_flag(text: str) -> float:
    """A flag's type: requests a second, or inf."""
    return _positive(text)


def _positive(text: str) -> float:
    value = _number(text)
    if value is None or not value > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _random_dataset(arguments: argparse.Namespace) -> RandomDataset:
    ratio = arguments.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, not {ratio:g}.")
    return RandomDataset(
        LengthRange.around(arguments.random_input_len, ratio),
        LengthRange.around(arguments.random_output_len, ratio),
        _NUM_PROMPTS,
    )
