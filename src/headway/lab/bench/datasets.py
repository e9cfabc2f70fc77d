"""Where the requests of a load come from: random tokens, a file of prompts, or a workload.

All of them draw for a number of requests, a rate and a seed, so that a sweep can ask for the same work at another rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.errors import ConfigError
from headway.lab.bench.arrivals import draw_arrivals
from headway.lab.bench.served import Prompt, ServedRequest
from headway.lab.workload.requests import HIGHEST_TOKEN_ID, LengthRange, draw_work

if TYPE_CHECKING:
    from headway.lab.workload import Workload
    from headway.tokenizer import Tokenizer


DEFAULT_VOCAB_SIZE = HIGHEST_TOKEN_ID + 1
"""Of a server that does not tell: random prompts have no higher ids anyway."""


@dataclass(frozen=True)
class Draw:
    """What is wanted of a dataset."""

    num_requests: int | None
    """`None`: as many as it has."""
    rate: float
    """Requests a second; infinite: the workload's own times, or all at once."""
    burstiness: float = 1.0
    seed: int = 0
    vocab_size: int = DEFAULT_VOCAB_SIZE
    tokenizer: Tokenizer | None = None


class Dataset(Protocol):
    """A source of requests."""

    def draw(self, wanted: Draw) -> list[ServedRequest]:
        """The same for the same seed."""
        ...


@dataclass(frozen=True)
class RandomDataset:
    """Prompts of random token ids."""

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
    """The same requests, each as early as it can be."""
    return [dataclasses.replace(request, arrival_s=0.0, think_s=0.0) for request in work]
