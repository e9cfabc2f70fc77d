"""What `bench sweep` and `bench capacity` share: runs of the same work at rates, long enough to mean something."""

from __future__ import annotations

import argparse
import math
import random

from headway.bench.server_target import ServerTarget
from headway.bench.targets import Outcome, Target
from headway.cli.bench_target_flags import add_server_flags
from headway.cli.bench_work import add_judging_flags, add_work_flags, dataset_of, draw_of
from headway.cli.counts import count
from headway.cli.flags import add_flags, engine_flags
from headway.cli.progress import progress_bar


def add_probe_flags(parser: argparse.ArgumentParser) -> None:
    """Everything about a run but its rate."""
    parser.add_argument(
        "--probe-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="At a rate, as many requests are sent as come in this time, unless --num-prompts says how many. "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--min-requests", type=count(1), default=50, metavar="N", help="But at least so many. (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    parser.add_argument("--output-json", metavar="FILE", help="Write the result here.")
    parser.add_argument("--html", metavar="FILE", help="Write a report with plots.")
    parser.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    add_judging_flags(parser)
    add_work_flags(parser)
    add_server_flags(parser)
    add_flags(parser, engine_flags())


def probe(arguments: argparse.Namespace, target: Target, rate: float, title: str) -> Outcome:
    """Run the work at a rate. Requests to a server have other contents at each rate, for the sake of its prefix cache;
    an engine in this process is told to keep the runs apart, and gets the same ones."""
    seed = seed_of(arguments)
    if isinstance(target, ServerTarget):
        seed = random.Random(f"{seed} {rate:g}").getrandbits(32)
    wanted = draw_of(arguments, rate=rate, seed=seed, num_requests=num_requests_at(arguments, rate))
    work = target.draw(dataset_of(arguments), wanted)
    with progress_bar(len(work), title, is_shown=not arguments.disable_tqdm) as progress:
        return target.run(work, progress)


def num_requests_at(arguments: argparse.Namespace, rate: float) -> int:
    """As many as were asked for, or as fill the time."""
    if arguments.num_prompts is not None:
        return int(arguments.num_prompts)
    if math.isinf(rate):
        return int(arguments.min_requests)
    return max(int(arguments.min_requests), math.ceil(rate * arguments.probe_seconds))


def seed_of(arguments: argparse.Namespace) -> int:
    """The engine's flag, which is left out unless given."""
    return int(getattr(arguments, "seed", 0))
