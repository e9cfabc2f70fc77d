"""Where the requests of a load come from: random tokens, a file of prompts, or a workload; and the flags that say so.

All of them draw for a number of requests, a rate and a seed, so that a sweep can ask for the same work at another rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.console.flags import count, number, positive
from headway.errors import ConfigError
from headway_lab.bench.served import Prompt, ServedRequest
from headway_lab.workload.bench_requests import HIGHEST_TOKEN_ID, LengthRange, draw_work
from headway_lab.workload.catalogue import add_workload_argument

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer
    from headway_lab.workload import Workload


DEFAULT_VOCAB_SIZE = HIGHEST_TOKEN_ID + 1
"""The vocabulary assumed for a server that does not report its own: random prompts have no higher ids anyway."""

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
"""Flags that have an effect with only one kind of dataset."""


def draw_arrivals(num_requests: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Times in seconds. Gaps are drawn from a gamma distribution of this shape: 1 is a Poisson process, less comes in
    bursts, more is evener. They are then scaled so that the last request comes at `num_requests / rate`, as in vLLM's
    benchmark: the rate is met exactly. At an infinite rate all come at once."""
    if math.isinf(rate):
        return [0.0] * num_requests
    rng = random.Random(seed)
    times = list(itertools.accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(num_requests)))
    scale = num_requests / rate / times[-1] if times and times[-1] else 0.0
    return [time * scale for time in times]


@dataclass(frozen=True)
class Draw:
    """A request to a dataset: how many requests, at which rate."""

    num_requests: int | None
    """`None`: as many as it has."""
    rate: float
    """Requests a second; infinite: the workload's own times, or all at once."""
    burstiness: float = 1.0
    seed: int = 0
    vocab_size: int = DEFAULT_VOCAB_SIZE
    tokenizer: Tokenizer | None = None


class Dataset(Protocol):
    def draw(self, wanted: Draw) -> list[ServedRequest]:
        """Draw the requests; the same seed gives the same ones."""
        ...


@dataclass(frozen=True)
class RandomDataset:
    input_len: LengthRange
    output_len: LengthRange
    default_num_requests: int = 1_000

    def draw(self, wanted: Draw) -> list[ServedRequest]:
        work = draw_work(
            random.Random(wanted.seed),
            wanted.num_requests or self.default_num_requests,
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=wanted.vocab_size,
        )
        return _at_rate([ServedRequest.of(request) for request in work], wanted)


@dataclass(frozen=True)
class CustomDataset:
    """A JSONL file. A line has `prompt` (a text, or token ids) and perhaps `output_tokens`; or, as in ShareGPT,
    `conversations`, of which the first turn is asked."""

    path: Path
    default_output_len: int

    def draw(self, wanted: Draw) -> list[ServedRequest]:
        rows = list(itertools.islice(self._rows(), wanted.num_requests))
        if not rows:
            raise ConfigError(f"'{self.path}' has no prompts.")
        return _at_rate(rows, wanted)

    def _rows(self) -> Iterator[ServedRequest]:
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield self._request(line, number)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"Cannot read the prompts '{self.path}': {reason}.") from error

    def _request(self, line: str, number: int) -> ServedRequest:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        prompt = _prompt_of(row) if isinstance(row, dict) else None
        num_output_tokens = row.get("output_tokens", self.default_output_len) if isinstance(row, dict) else 0
        if prompt is None or not isinstance(num_output_tokens, int) or num_output_tokens < 1:
            raise ConfigError(
                f"Line {number} of '{self.path}' is not a JSON object with a 'prompt' (text or token ids), or with "
                "'conversations', and at least 1 in 'output_tokens' if it has any."
            )
        return ServedRequest(prompt, num_output_tokens)


@dataclass(frozen=True)
class WorkloadDataset:
    """A workload file: its arrivals, unless a rate is given, and its lengths and contents."""

    workload: Workload

    def draw(self, wanted: Draw) -> list[ServedRequest]:
        if self.workload.needs_tokenizer and wanted.tokenizer is None:
            raise ConfigError("The workload's prompts are texts, which takes the model's tokenizer: --tokenizer PATH.")
        work = self.workload.draw(
            vocab_size=wanted.vocab_size,
            seed=wanted.seed,
            tokenizer=wanted.tokenizer,
            num_requests=wanted.num_requests,
            rate=None if math.isinf(wanted.rate) else wanted.rate,
        )
        return [ServedRequest.of(request) for request in work]


def _prompt_of(row: dict[str, Any]) -> Prompt | None:
    prompt = row.get("prompt")
    turns = row.get("conversations")
    if prompt is None and isinstance(turns, list) and turns and isinstance(turns[0], dict):
        prompt = turns[0].get("value")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token_id) is int for token_id in prompt):
        return prompt
    return None


def _at_rate(requests: Sequence[ServedRequest], wanted: Draw) -> list[ServedRequest]:
    arrivals = draw_arrivals(len(requests), wanted.rate, burstiness=wanted.burstiness, seed=wanted.seed)
    return [dataclasses.replace(request, arrival_s=at_s) for request, at_s in zip(requests, arrivals, strict=True)]


def at_once(work: Sequence[ServedRequest]) -> list[ServedRequest]:
    """The same requests, each as early as it can be sent."""
    return [dataclasses.replace(request, arrival_s=0.0, think_s=0.0) for request in work]


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the requests. A flag that is not given is `None`."""
    group = parser.add_argument_group("work")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="random: token ids; custom: a JSONL file with a 'prompt' (text or ids) and perhaps 'output_tokens' in "
        "each line, or ShareGPT's 'conversations'; workload: a TOML file. (default: random)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="The file of the dataset.")
    add_workload_argument(group, "--workload", "The same as --dataset-name workload --dataset-path WORKLOAD.")
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
        type=number(),
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
        type=positive,
        metavar="X",
        help="Shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, less comes in "
        f"bursts, more is evener. A workload has its own. (default: {_BURSTINESS:g})",
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

    from headway_lab.workload import load_workload, parse_overrides

    workload = load_workload(path, data_dir=arguments.data_dir, **parse_overrides(arguments.set or ()))
    workload.check_data()
    return WorkloadDataset(workload)


def burstiness_of(arguments: argparse.Namespace, rates: Sequence[float]) -> float:
    """The burstiness of a load at these rates."""
    if arguments.burstiness is not None and all(map(math.isinf, rates)):
        raise ConfigError("--burstiness is about requests that come at a rate, and these come all at once.")
    return _BURSTINESS if arguments.burstiness is None else float(arguments.burstiness)


def tokenizer_of(arguments: argparse.Namespace, dataset: Dataset) -> Tokenizer | None:
    """The tokenizer for prompts that are texts and go to a server. An engine in this process has its own."""
    path = getattr(arguments, "tokenizer", None)
    needs_one = isinstance(dataset, WorkloadDataset) and dataset.workload.needs_tokenizer
    if needs_one and path is None:
        raise ConfigError("The workload's prompts are texts, which takes the model's tokenizer: --tokenizer PATH.")
    if path is None:
        return None
    if not needs_one:
        raise ConfigError("--tokenizer is for workloads whose prompts are texts; it has no effect on these.")
    from headway.config import ModelConfig
    from headway.loader.chosen_model import load_model_tokenizer

    return load_model_tokenizer(ModelConfig(tokenizer=path))


def new_seed() -> int:
    """A new seed each time, so that a server has no prompts of an earlier run cached; short enough to type."""
    return random.SystemRandom().randrange(1_000_000)


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
    """`ConfigError` for a flag that has no effect on this kind of dataset."""
    for flag, kind in _BELONGS_TO.items():
        if getattr(arguments, flag) is not None and kind != name:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is for the dataset '{kind}' and has no effect on the dataset '{name}'."
            )
    if arguments.burstiness is not None and name == "workload":
        raise ConfigError("--burstiness has no effect on a workload: its file says how requests come.")
