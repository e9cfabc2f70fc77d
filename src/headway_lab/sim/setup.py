"""The setup of a simulated engine from a calibration and options. Options whose effect was not measured are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import SchedulerConfig, check_names
from headway.errors import ConfigError
from headway.settings import CacheSettings, SchedulerSettings
from headway_lab.sim.calibration import Calibration, Machine
from headway_lab.sim.cost_model import Link
from headway_lab.workload.bench_requests import BenchRequest

_SCHEDULER = frozenset(field.name for field in dataclasses.fields(SchedulerConfig))
_UNPREDICTABLE = {
    "gpu_memory_utilization": "it changes how many KV blocks there are; give --num-kv-blocks",
    "kv_cache_dtype": "it changes how long steps take; calibrate an engine with it",
}


@dataclass(frozen=True)
class Setup:
    """What a simulation runs on, and with which settings."""

    machine: Machine
    scheduler: SchedulerSettings
    cache: CacheSettings
    notes: Sequence[str] = ()
    """Notes on what differs from the measured engine."""


def set_up(calibration: Calibration, options: Mapping[str, Any], *, link: Link | None = None) -> Setup:
    """The calibrated engine, with these options in place of its own. `link` is the link to other replicas."""
    check_names(options)
    for name, reason in _UNPREDICTABLE.items():
        if name in options and options[name] != calibration.cache.get(name):
            raise ConfigError(f"--{name.replace('_', '-')} cannot be simulated from a calibration: {reason}.")
    scheduler = _scheduler(calibration, {name: value for name, value in options.items() if name in _SCHEDULER})
    cache_options = {name: value for name, value in options.items() if name not in _SCHEDULER}
    cache = calibration.cache_settings(**cache_options)
    machine, notes = _machine(calibration, cache, scheduler, link)
    return Setup(machine, scheduler, cache, notes)


def _scheduler(calibration: Calibration, options: Mapping[str, Any]) -> SchedulerSettings:
    """The scheduler's settings. If one of two related limits was given and contradicts the calibrated other, the other
    one gives way, as defaults do."""
    merged = {**calibration.scheduler, **options}
    if (
        "max_num_batched_tokens" not in options
        and (options.get("max_num_seqs") or 0) > merged["max_num_batched_tokens"]
    ):
        merged["max_num_batched_tokens"] = options["max_num_seqs"]
    if "max_num_seqs" not in options and (options.get("max_num_batched_tokens") or 1 << 60) < merged["max_num_seqs"]:
        merged["max_num_seqs"] = options["max_num_batched_tokens"]
    return SchedulerConfig(**merged).resolve(calibration.device_kind)


def _machine(
    calibration: Calibration, cache: CacheSettings, scheduler: SchedulerSettings, link: Link | None
) -> tuple[Machine, Sequence[str]]:
    machine, notes = calibration.machine(link=link), []
    block_size = cache.block_size
    num_blocks = machine.num_blocks * machine.block_size // block_size
    bytes_per_block = calibration.bytes_per_block * block_size // machine.block_size
    if block_size != machine.block_size:
        notes.append(
            f"Blocks of {block_size} tokens; steps were measured with {machine.block_size}, and what that changes in "
            "their time is not known."
        )
    if cache.num_kv_blocks is not None:
        num_blocks = cache.num_kv_blocks
    elif cache.kv_cache_memory is not None:
        num_blocks = _divided(cache.kv_cache_memory, bytes_per_block, "kv_cache_memory")
    if cache.disk_cache:
        raise ConfigError("--disk-cache: a simulation has no disk.")
    num_host_slots = machine.num_host_slots
    if cache.host_cache_memory is not None:
        num_host_slots = _divided(cache.host_cache_memory, bytes_per_block, "host_cache_memory")
        if not machine.restore_block_s:
            raise ConfigError(
                "--host-cache-memory: how fast blocks come back from the host was not measured; calibrate with it."
            )
    measured_seqs = calibration.scheduler.get("max_num_seqs") or scheduler.max_num_seqs
    if scheduler.max_num_seqs > 2 * measured_seqs:
        notes.append(f"Steps of up to {scheduler.max_num_seqs} requests; measured were up to {measured_seqs}.")
    if calibration.tensor_parallel_size > 1:
        notes.append(
            f"{calibration.tensor_parallel_size} ranks: steps of one were measured alone; what travels between them is "
            f"computed, at {machine.link.gb_s:g} GB/s and {1e6 * machine.link.latency_s:g} µs."
        )
    changed = dataclasses.replace(
        machine,
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_slots=num_host_slots,
        bytes_per_block=bytes_per_block,
    )
    return changed, notes


def check_ranks(calibration: Calibration, tensor_parallel_size: int | None) -> None:
    """`ConfigError` if the calibration was measured with another number of ranks."""
    measured = calibration.tensor_parallel_size
    if tensor_parallel_size is not None and tensor_parallel_size != measured:
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel_size}: the calibration is that of one rank of {measured}, and "
            "what a smaller or larger part of the model takes is not known. Give one that 'headway calibrate "
            f"--tensor-parallel-size {tensor_parallel_size} --collectives none --output FILE' has written."
        )


def check_guesses(machine: Machine, scheduler: SchedulerSettings, answers: Sequence[Sequence[int]] | None) -> None:
    """`ConfigError` if it is not known how many guesses are right."""
    if answers is not None and machine.overlap:
        raise ConfigError(
            "Answers can be replayed where steps run one after the other. Here the device guesses while steps overlap: "
            "say with spec_synthetic_acceptance how many tokens a step guesses bring."
        )
    if scheduler.speculation == "off" or scheduler.spec_synthetic_acceptance or answers is not None:
        return
    if scheduler.speculation == "draft" and machine.drafting.acceptance:
        return
    raise ConfigError(
        "A simulation has no text to guess tokens from: say with spec_synthetic_acceptance how many tokens a step "
        "guesses bring, or leave speculation 'off'."
    )


def _divided(num_bytes: int, bytes_per_block: int, name: str) -> int:
    num_blocks = num_bytes // bytes_per_block if bytes_per_block else 0
    if num_blocks < 1:
        raise ConfigError(f"{name} of {num_bytes:,} bytes has no room for a KV block of {bytes_per_block:,} bytes.")
    return num_blocks


def check_work(work: Sequence[BenchRequest], machine: Machine) -> None:
    """Refuse requests that the engine would refuse, before any of them runs."""
    longest = max((request.num_prompt_tokens + request.num_output_tokens for request in work), default=0)
    room = min(machine.max_model_len, machine.num_blocks * machine.block_size)
    if longest > room:
        raise ConfigError(
            f"The work has a request of {longest:,} tokens, prompt and output together, but the calibrated engine "
            f"takes at most {room:,}. Cut it (--set limits.max_input=N), or calibrate with a larger --max-model-len."
        )


def with_oracle(work: Sequence[BenchRequest]) -> list[BenchRequest]:
    """The same requests; those without a prediction get their true length as one."""
    return [
        request
        if request.options.predicted_tokens is not None
        else dataclasses.replace(
            request,
            options=dataclasses.replace(request.options, predicted_tokens=float(request.num_output_tokens)),
        )
        for request in work
    ]
