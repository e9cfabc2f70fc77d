"""Which engine each replica runs, and where: GPUs or cores of this machine for each, and the parts that they have where
prefill and decode are apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from headway.errors import ConfigError
from headway.front.connection import Home
from headway.front.roles import Roles
from headway.wire.messages import BlockExchange, Role


@dataclass(frozen=True)
class EngineSpec:
    """Which engine to run, and where."""

    options: Mapping[str, Any]
    """Those of `EngineConfig`, flat."""
    factory: str | None = None
    """Another engine, see `engine_process`."""
    log_level: str = "INFO"
    reports_cache: bool = False
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    home: Home | None = None
    """Where its process comes from; None: it is started here, for this front end alone."""
    blocks: BlockExchange | None = None
    """Its part, where prefill and decode are apart."""

    @property
    def num_ranks(self) -> int:
        """Devices of a replica."""
        return int(self.options.get("tensor_parallel_size", 1))


def divided(spec: EngineSpec, num_replicas: int) -> list[EngineSpec]:
    """One for each replica on this machine: a GPU for each of its ranks, or a share of the cores."""
    if num_replicas == 1:
        return [spec]
    gpus = [] if spec.options.get("device") == "cpu" else visible_gpus()
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


ARRIVAL_MEMORY = 2**30
CPU_ARRIVAL_MEMORY = 2**28
"""Where blocks arrive, if nothing is said: room for them is needed only until they are copied in. The smaller one is
for a machine without a GPU."""
GPU_PREFILL_TOKENS = 2048
"""The most that a step of a GPU that computes prompts has, if nothing is said: as fast as larger ones (H200), and the
blocks of a part travel while the next part is computed."""


def apart(specs: Sequence[EngineSpec], roles: Roles, exchange: BlockExchange) -> list[EngineSpec]:
    """The same with their parts: those that answer come first."""
    parts: dict[Role, int] = {"decode": roles.num_decode, "prefill": roles.num_prefill}
    each = [role for role, number in parts.items() for _ in range(number)]
    limits = {"max_num_batched_tokens": GPU_PREFILL_TOKENS}
    return [
        replace(
            spec,
            blocks=msgspec.structs.replace(exchange, role=role),
            options={**limits, **spec.options} if role == "prefill" and _has_gpu(spec) else spec.options,
        )
        for spec, role in zip(specs, each, strict=True)
    ]


def options_apart(options: Mapping[str, Any], carrier: Literal["auto", "tcp"] = "auto") -> dict[str, Any]:
    """An engine's options where prefill and decode are apart: there is room for blocks to arrive in. What does not go
    with that is refused."""
    if sys.platform != "linux":
        raise ConfigError("roles need Linux, for the memory that engine processes share.")
    if not options.get("enable_prefix_caching", True):
        raise ConfigError("roles need the prefix cache, by which blocks are found; it is switched off.")
    if options.get("tensor_parallel_size", 1) != 1:
        raise ConfigError("roles do not go with tensor_parallel_size: ranks have parts of blocks.")
    if options.get("draft_model") is not None:
        raise ConfigError("roles do not go with a draft model, whose blocks would have to travel as well.")
    if options.get("preemption_mode") == "recompute":
        raise ConfigError("roles do not go with --preemption-mode recompute: blocks that come are copied in.")
    if options.get("host_cache_memory") is not None or options.get("arrival_memory") is not None:
        return dict(options)
    is_here, has_gpu = carrier == "auto", _has_gpu(EngineSpec(options))
    if is_here and has_gpu and not options.get("disk_cache"):
        return {**options, "arrival_memory": ARRIVAL_MEMORY}
    return {**options, "host_cache_memory": CPU_ARRIVAL_MEMORY if is_here and not has_gpu else ARRIVAL_MEMORY}


def _has_gpu(spec: EngineSpec) -> bool:
    if spec.home is not None:
        return spec.home.num_gpus > 0
    return spec.options.get("device") != "cpu" and bool(visible_gpus())
