"""Flags that say which requests are sent, and how the outcome is judged: the same for every benchmark under load."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.counts import count
from headway.errors import ConfigError
from headway.lab.bench.datasets import CustomDataset, Dataset, Draw, RandomDataset, WorkloadDataset
from headway.lab.bench.online_metrics import SHOWN_PERCENTILES
from headway.lab.bench.slo import Targets
from headway.lab.bench.targets import Judging
from headway.lab.workload.requests import LengthRange

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer

DATASETS = ("random", "custom", "workload")
_NUM_PROMPTS, _INPUT_LEN, _OUTPUT_LEN, _CUSTOM_OUTPUT_LEN = 1000, 1024, 128, 256
_RANGE_RATIO, _BURSTINESS = 0.0, 1.0
_BELONGS_TO = {
    "random_input_len": "random",
    "random_output_len": "random",
    "random_range_ratio": "random",
    "custom_output_len": "custom",
    "data_dir": "workload",
    "set": "workload",
}
"""Flags that have an effect with one kind of dataset."""
_TARGETS = ("ttft", "tpot", "e2el")


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    """Which requests. What is not given is `None`."""
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
        metavar="KEY=VALUE",
        help="Another value for a key of the workload, e.g. limits.max_input=2000. May be given several times.",
    )
    group.add_argument(
        "--num-prompts",
        type=count(1),
        metavar="N",
        help=f"How many requests. (default: {_NUM_PROMPTS}; of a file, as many as it has)",
    )
    group.add_argument("--random-input-len", type=count(1), metavar="N", help=f"(default: {_INPUT_LEN})")
    group.add_argument("--random-output-len", type=count(1), metavar="N", help=f"(default: {_OUTPUT_LEN})")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        metavar="R",
        help=f"Lengths are drawn from length × (1 - R) to length × (1 + R), 0 ≤ R < 1. (default: {_RANGE_RATIO:g})",
    )
    group.add_argument(
        "--custom-output-len",
        type=count(1),
        metavar="N",
        help=f"Of lines without 'output_tokens'. (default: {_CUSTOM_OUTPUT_LEN})",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        metavar="X",
        help="Shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, less comes in "
        f"bursts, more is evener. A workload has its own. (default: {_BURSTINESS:g})",
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
    """The dataset that the flags name, with its files read."""
    name = arguments.dataset_name or ("workload" if arguments.workload else "random")
    path = arguments.workload or arguments.dataset_path
    if arguments.workload and (name != "workload" or arguments.dataset_path):
        raise ConfigError("--workload is a dataset of its own; give it without --dataset-name and --dataset-path.")
    _check_effects(arguments, name)
    if name == "random":
        if path is not None:
            raise ConfigError("--dataset-path goes with --dataset-name custom or workload.")
        return _random_dataset(arguments)
    if path is None:
        raise ConfigError(f"--dataset-name {name} needs the file: --dataset-path FILE.")
    if name == "custom":
        dataset = CustomDataset(Path(path), arguments.custom_output_len or _CUSTOM_OUTPUT_LEN)
        dataset.draw(Draw(arguments.num_prompts, math.inf))  # a bad line is known before a model is loaded
        return dataset

    from headway.lab.workload import load_workload, parse_overrides

    return WorkloadDataset(load_workload(path, data_dir=arguments.data_dir, **parse_overrides(arguments.set or ())))


def burstiness_of(arguments: argparse.Namespace, rates: Sequence[float]) -> float:
    """Between the requests of a load at these rates."""
    if arguments.burstiness is not None and all(map(math.isinf, rates)):
        raise ConfigError("--burstiness is about requests that come at a rate, and these come all at once.")
    return _BURSTINESS if arguments.burstiness is None else float(arguments.burstiness)


def tokenizer_of(arguments: argparse.Namespace, dataset: Dataset) -> Tokenizer | None:
    """For prompts that are texts, on their way to a server. An engine in this process has its own."""
    path = getattr(arguments, "tokenizer", None)
    needs_one = isinstance(dataset, WorkloadDataset) and dataset.workload.needs_tokenizer
    if needs_one and path is None:
        raise ConfigError("The workload's prompts are texts, which takes the model's tokenizer: --tokenizer PATH.")
    if path is None:
        return None
    if not needs_one:
        raise ConfigError("--tokenizer is for workloads whose prompts are texts; it has no effect on these.")
    from headway.config import ModelConfig
    from headway.loader.model_tokenizer import load_model_tokenizer

    return load_model_tokenizer(ModelConfig(tokenizer=path))


def new_seed() -> int:
    """Another one each time, so that a server does not know the prompts from a run before; short enough to type."""
    return random.SystemRandom().randrange(1_000_000)


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
    ratio = _RANGE_RATIO if arguments.random_range_ratio is None else arguments.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, not {ratio:g}.")
    return RandomDataset(
        LengthRange.around(arguments.random_input_len or _INPUT_LEN, ratio),
        LengthRange.around(arguments.random_output_len or _OUTPUT_LEN, ratio),
        _NUM_PROMPTS,
    )


def _check_effects(arguments: argparse.Namespace, name: str) -> None:
    """A flag that says nothing about this kind of dataset is a mistake."""
    for flag, kind in _BELONGS_TO.items():
        if getattr(arguments, flag) is not None and kind != name:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is for the dataset '{kind}' and has no effect on the dataset '{name}'."
            )
    if arguments.burstiness is not None and name == "workload":
        raise ConfigError("--burstiness has no effect on a workload: its file says how requests come.")
