"""Assigns each replica its engine, its GPUs or cores of this machine, and its role if prefill and decode are
divided."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headway.config import PREFILL_STEP_TOKENS, EngineConfig, option_names
from headway.errors import ConfigError
from headway.front.connection import Home
from headway.front.roles import Roles
from headway.wire.messages import BlockExchange, Role


@dataclass(frozen=True)
class EngineSpec:
    """Which engine to run, and where."""

    options: Mapping[str, Any]
    """Flat options of `EngineConfig`. Another factory may accept others too."""
    factory: str | None = None
    """The factory of another engine (see `engine_process`)."""
    log_level: str = "INFO"
    reports_cache: bool = False
    reports_tokens: bool = False
    """Whether these reports have the tokens of the blocks."""
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    home: Home | None = None
    """The source of its process. None: it is started on this machine, for this front end alone."""
    blocks: BlockExchange | None = None
    """Its role and how blocks travel, where prefill and decode are divided."""

    @functools.cached_property
    def config(self) -> EngineConfig:
        """The configuration from the options, without those that only another factory knows."""
        known = option_names()
        return EngineConfig.from_options(**{name: value for name, value in self.options.items() if name in known})

    @property
    def num_ranks(self) -> int:
        """The number of devices of a replica."""
        return self.config.device.tensor_parallel_size

    @property
    def has_gpu(self) -> bool:
        """Whether the engine will run on GPUs."""
        if self.home is not None:
            return self.home.num_gpus > 0
        return self.config.device.device != "cpu" and bool(visible_gpus())


def divide(spec: EngineSpec, num_replicas: int) -> list[EngineSpec]:
    """One spec per replica on this machine, with a GPU for each of its ranks or a share of the cores. Raises
    `ConfigError` if there are too few GPUs."""
    if num_replicas == 1:
        return [spec]
    gpus = [] if spec.config.device.device == "cpu" else visible_gpus()
    if gpus:
        each = spec.num_ranks
        if len(gpus) < num_replicas * each:
            raise ConfigError(f"{num_replicas} replicas need {_gpus(each)} each, and {len(gpus)} are visible.")
        chosen = [",".join(gpus[place * each : (place + 1) * each]) for place in range(num_replicas)]
        return [replace(spec, environment={**spec.environment, "CUDA_VISIBLE_DEVICES": own}) for own in chosen]
    if sys.platform != "linux":
        return [spec] * num_replicas
    cores = sorted(os.sched_getaffinity(0))
    shares = [tuple(cores[place::num_replicas]) or (cores[place % len(cores)],) for place in range(num_replicas)]
    return [replace(spec, cores=share) for share in shares]


def _gpus(number: int) -> str:
    return "a GPU" if number == 1 else f"{number} GPUs"


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; found without loading CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    try:
        return [str(number) for number in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


def with_roles(specs: Sequence[EngineSpec], roles: Roles, exchange: BlockExchange) -> list[EngineSpec]:
    """The specs with roles assigned. The decode replicas come first."""
    counts: dict[Role, int] = {"decode": roles.num_decode, "prefill": roles.num_prefill}
    each = [role for role, number in counts.items() for _ in range(number)]
    return [
        _for_prompts(spec, exchange) if role == "prefill" else replace(spec, blocks=exchange)
        for spec, role in zip(specs, each, strict=True)
    ]


def _for_prompts(spec: EngineSpec, exchange: BlockExchange) -> EngineSpec:
    options = dict(spec.options)
    if spec.has_gpu and spec.config.scheduler.max_num_batched_tokens is None:
        options["max_num_batched_tokens"] = PREFILL_STEP_TOKENS
    return replace(spec, options=options, blocks=msgspec.structs.replace(exchange, role="prefill"))
