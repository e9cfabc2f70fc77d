"""What `bench sweep` and `bench capacity` share: runs of the same work at rates, long enough to mean something."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.cli.bench_target_flags import add_server_flags, add_warmup_flag, names_a_server
from headway.cli.bench_work import (
    add_judging_flags,
    add_work_flags,
    burstiness_of,
    dataset_of,
    new_seed,
    tokenizer_of,
)
from headway.cli.flags import add_flags, count, engine_flags, positive
from headway.cli.progress import progress_bar
from headway.errors import ConfigError
from headway.lab.bench.datasets import Dataset, Draw, at_once
from headway.lab.bench.targets import Outcome, Target

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer


def add_probe_flags(parser: argparse.ArgumentParser, *, probe_seconds: float, min_requests: int) -> None:
    """Everything about a run but its rate."""
    parser.add_argument(
        "--probe-seconds",
        type=positive,
        metavar="S",
        help="At a rate, as many requests are sent as come in this time, unless --num-prompts says how many. "
        f"(default: {probe_seconds:g})",
    )
    parser.add_argument(
        "--min-requests", type=count(1), metavar="N", help=f"But at least so many. (default: {min_requests})"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    add_warmup_flag(parser)
    parser.add_argument("--output-json", metavar="FILE", help="Write the result here.")
    parser.add_argument("--html", metavar="FILE", help="Write a report with plots.")
    parser.add_argument("--disable-tqdm", action="store_true", help="Do not show how far it is.")
    add_judging_flags(parser)
    add_work_flags(parser)
    add_server_flags(parser)
    add_flags(parser, engine_flags())
    parser.set_defaults(default_probe_seconds=probe_seconds, default_min_requests=min_requests)


@dataclass(frozen=True)
class Probing:
    """The work of runs at rates, and how much of it each has."""

    dataset: Dataset
    tokenizer: Tokenizer | None
    """For a server; an engine brings its own."""
    seed: int
    burstiness: float
    num_requests: int | None
    min_requests: int
    seconds: float
    is_server: bool
    is_shown: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace, rates: Sequence[float] = (1.0,)) -> Probing:
        """From the flags, with everything read and checked. The seed of a load on a server is another one each time,
        unless it is given."""
        is_server = names_a_server(arguments)
        dataset = dataset_of(arguments)
        if arguments.num_prompts is not None and (arguments.probe_seconds or arguments.min_requests):
            raise ConfigError(
                "--num-prompts says how many requests a run has; --probe-seconds and --min-requests do too."
            )
        return cls(
            dataset=dataset,
            tokenizer=tokenizer_of(arguments, dataset) if is_server else None,
            seed=getattr(arguments, "seed", new_seed() if is_server else 0),
            burstiness=burstiness_of(arguments, rates),
            num_requests=arguments.num_prompts,
            min_requests=arguments.min_requests or arguments.default_min_requests,
            seconds=arguments.probe_seconds or arguments.default_probe_seconds,
            is_server=is_server,
            is_shown=not arguments.disable_tqdm,
        )

    def num_requests_at(self, rate: float) -> int:
        """As many as were asked for, or as fill the time."""
        if self.num_requests is not None:
            return self.num_requests
        return self.min_requests if math.isinf(rate) else max(self.min_requests, math.ceil(rate * self.seconds))

    def run(self, target: Target, rate: float, title: str) -> Outcome:
        """Run the work at a rate. Requests to a server have other contents at each rate, for the sake of its prefix
        cache; an engine in this process is told to keep the runs apart, and gets the same ones."""
        seed = random.Random(f"{self.seed} {rate:g}").getrandbits(32) if self.is_server else self.seed
        wanted = Draw(self.num_requests_at(rate), rate, self.burstiness, seed, tokenizer=self.tokenizer)
        work = target.draw(self.dataset, wanted)
        with progress_bar(len(work), title, is_shown=self.is_shown) as progress:
            return target.run(work, progress)

    def served_rate(self, target: Target) -> float:
        """Requests a second, if all are there at once."""
        wanted = Draw(self.num_requests_at(math.inf), math.inf, 1.0, self.seed, tokenizer=self.tokenizer)
        work = at_once(target.draw(self.dataset, wanted))
        with progress_bar(len(work), "all at once", is_shown=self.is_shown) as progress:
            rate = target.run(work, progress).metrics.requests_s
        if not rate:
            raise ConfigError("No request was answered, so there is no rate to start from; give one.")
        return rate
