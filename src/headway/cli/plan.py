"""`headway plan`: how much memory a model needs, and how much it can serve with given memory, without loading it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import asdict, dataclass

from headway.cli.every_option import every_option
from headway.config import EngineConfig
from headway.console.flags import FlagSpec, engine_flags, memory_size, with_shape_defaults
from headway.console.settled_options import add_settled_flags, settle
from headway.worker.memory_needs import MODEL_OPTIONS, Needs, planned_model

GPU_MEMORIES = (8, 12, 16, 24, 32, 40, 48, 80, 141)
CPU_MEMORIES = (2, 4, 8, 16, 32, 64)
"""Common memory sizes in GiB, of GPUs and of machines without one."""
SHORT_REQUEST = 4096
"""The length in tokens of a typical request, shown besides the longest."""
_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="As --model.")
    parser.add_argument(
        "--memory",
        nargs="+",
        type=memory_size,
        metavar="SIZE",
        help="Memory of the devices to plan for, e.g. 24GiB 80GiB. Default: the usual ones.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    add_settled_flags(parser, _flags())


def _flags() -> list[FlagSpec]:
    return [dataclasses.replace(spec, is_engines=False) for spec in engine_flags() if spec.name in MODEL_OPTIONS]


def run(arguments: argparse.Namespace) -> int:
    settled = settle(arguments, _flags(), every_option(), model=arguments.name)
    with settled.naming_sources():
        config = EngineConfig.from_options(**with_shape_defaults(settled.given()))
    if arguments.print_config:
        print(settled.toml(), end="")
        return 0
    planned = planned_model(config)
    needs, title = planned.needs, planned.title
    sizes = arguments.memory or [gib * _GIB for gib in (GPU_MEMORIES if needs.on_cuda else CPU_MEMORIES)]
    rows = [_fit(size, needs, config) for size in sizes]
    if arguments.json:
        print(json.dumps({"model": title, **asdict(needs), "memory": [asdict(row) for row in rows]}, indent=2))
    else:
        _print(title, needs, rows)
    return 0


@dataclass(frozen=True)
class Fit:
    """What a device of some memory can serve."""

    memory_bytes: int
    kv_bytes: int
    """The bytes left for the KV cache; 0: the weights do not fit."""
    num_tokens: int
    num_full_requests: float
    num_short_requests: float


def _fit(size: int, needs: Needs, config: EngineConfig) -> Fit:
    left = needs.room(size, config.cache.gpu_memory_utilization)
    tokens = left // needs.kv_bytes_per_token
    return Fit(size, left, tokens, tokens / needs.max_model_len, tokens / min(SHORT_REQUEST, needs.max_model_len))


def _print(title: str, needs: Needs, rows: list[Fit]) -> None:
    short = min(SHORT_REQUEST, needs.max_model_len)
    each = f", on each of {needs.num_ranks} devices" if needs.num_ranks > 1 else ""
    print(f"{title}: {needs.num_parameters / 1e9:.2f} billion parameters, {needs.formats}{each}")
    print(f"weights        {_gib(needs.weight_bytes)}")
    print(f"working space  {_gib(needs.working_bytes)}")
    print(f"KV cache       {needs.kv_bytes_per_token / 1024:9,.1f} KiB a token ({needs.kv_dtype})")
    print(
        f"\n{'memory':>11}{'for the cache':>16}{'tokens':>14}   requests of {needs.max_model_len:,} / {short:,} tokens"
    )
    for row in rows:
        if not row.num_tokens:
            print(f"{_gib(row.memory_bytes)}   the weights do not fit")
            continue
        print(
            f"{_gib(row.memory_bytes)}{_gib(row.kv_bytes):>16}{row.num_tokens:>14,}   "
            f"{row.num_full_requests:,.1f} / {row.num_short_requests:,.1f}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:7,.2f} GiB"
