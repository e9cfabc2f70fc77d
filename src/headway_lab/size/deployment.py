"""What a replica runs on: one device or several, the model's options, and the calibration that says how fast that is.

a shipped calibration of this model, device and number of ranks, in these formats     taken as it is
one in other formats                                    changed by what the data sheet says of the difference
none                                                    made from the data sheet alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from headway.config import EngineConfig
from headway.console.flags import with_shape_defaults
from headway.errors import ConfigError
from headway.worker.memory_needs import PlannedModel, planned_model
from headway_lab.sim.calibration import CACHE_OPTIONS, Calibration, shipped_machines
from headway_lab.sim.cost_model import Link
from headway_lab.size.accuracy import config_of
from headway_lab.size.data_sheet_model import (
    DoesNotFit,
    data_sheet_calibration,
    data_sheet_cost,
    moved,
    rank_costs,
    weight_format_of,
)
from headway_lab.size.data_sheets import DataSheet, device_calibrated_as

Origin = Literal["calibrated", "changed", "data sheet"]


@dataclass(frozen=True)
class Bounds:
    """Of a replica."""

    most_ranks: int = 8
    """The most devices that one model is divided among: those of one machine."""
    least_context: int = 8192
    """The context that a server has at least, if the model's is as long."""


BOUNDS = Bounds()


@dataclass(frozen=True)
class Target:
    """What is to be sized: a model with options, and where it runs."""

    model: str
    options: Mapping[str, Any]
    """Options of the engine that were given: formats, memory, scheduler and cache."""
    sheet: DataSheet | None = None
    """`None`: the calibration's device is not a known one."""
    calibration: Calibration | None = None
    """A calibration that was named, instead of a device."""
    uses_calibrations: bool = True
    """Whether shipped calibrations may take the place of the data sheet."""
    longest: int = 1
    """Tokens of the longest request."""

    @property
    def device_name(self) -> str:
        if self.sheet is not None:
            return self.sheet.name
        return "" if self.calibration is None else self.calibration.device_name

    def with_options(self, **options: Any) -> Target:
        return dataclasses.replace(self, options={**self.options, **options})

    def on(self, sheet: DataSheet) -> Target:
        """The same on another device."""
        return dataclasses.replace(self, sheet=sheet, calibration=None, uses_calibrations=True)


@dataclass(frozen=True)
class Deployment:
    """One replica."""

    target: Target
    calibration: Calibration
    origin: Origin
    link: Link = field(default_factory=Link)
    max_model_len: int = 0
    """What the server is to be started with; 0: its default."""

    @property
    def num_devices(self) -> int:
        return self.calibration.tensor_parallel_size

    @property
    def device_name(self) -> str:
        return self.target.device_name

    @property
    def simulated_options(self) -> dict[str, Any]:
        """The given options of scheduler and cache, which a simulation takes. What the calibration already has in it is
        left out; a share of memory is only in one that was made from a data sheet."""
        in_it = {"kv_cache_dtype", *_MODEL_OPTIONS}
        in_it |= {"gpu_memory_utilization"} if self.origin == "data sheet" else set()
        return {name: value for name, value in self.target.options.items() if name not in in_it}

    @property
    def serve_flags(self) -> dict[str, Any]:
        """The options of `headway serve` that belong to the model and the device."""
        names = ("dtype", "quantization", "kv_cache_dtype", "gpu_memory_utilization")
        given = {name: self.target.options[name] for name in names if name in self.target.options}
        ranks = {"tensor_parallel_size": self.num_devices} if self.num_devices > 1 else {}
        length = {"max_model_len": self.max_model_len} if self.max_model_len else {}
        return {**given, **length, **ranks}


_MODEL_OPTIONS = ("model", "load_format", "dtype", "quantization", "max_model_len", "tensor_parallel_size")


def engine_config(target: Target, num_ranks: int) -> EngineConfig:
    """The options of an engine on a GPU. `ConfigError` for those that it would refuse."""
    given = {**target.options, "model": target.model, "device": "cuda", "tensor_parallel_size": num_ranks}
    config = EngineConfig.from_options(**{**with_shape_defaults(given), "load_format": "dummy"})
    _check_float8(target, config)
    if config.model.max_model_len is not None:
        return config
    most = _plan(config).config.max_position
    if target.longest > most:
        raise ConfigError(
            f"The work has a request of {target.longest:,} tokens, prompt and output together, but {target.model} was "
            f"made for {most:,} at most. Cut it: --set limits.max_total={most}."
        )
    rounded = -(-target.longest // 1024) * 1024
    wanted = min(max(BOUNDS.least_context, rounded), most)
    return EngineConfig.from_options(**{**with_shape_defaults(given), "load_format": "dummy", "max_model_len": wanted})


def _check_float8(target: Target, config: EngineConfig) -> None:
    if target.sheet is not None and target.sheet.fp8_tflops is None:
        for name, value in (
            ("quantization", config.model.quantization),
            ("kv-cache-dtype", config.cache.kv_cache_dtype),
        ):
            if value == "fp8":
                raise ConfigError(f"--{name} fp8: the {target.sheet.name} does not know float8; use int8.")


@cache
def _plan(config: EngineConfig) -> PlannedModel:
    return planned_model(config)


def deploy(target: Target, num_ranks: int) -> Deployment:
    """One replica on so many devices. Raises `DoesNotFit` if the model does not fit there."""
    named = target.calibration
    if named is not None and (target.options.get("max_model_len") or 0) > named.max_model_len:
        raise ConfigError(f"The calibrated engine takes at most {named.max_model_len:,} tokens: lower --max-model-len.")
    if named is not None and named.tensor_parallel_size != num_ranks:
        raise ConfigError(f"The calibration is that of one rank of {named.tensor_parallel_size}, not of {num_ranks}.")
    if named is not None and not _changes(target.options):
        return Deployment(target, named, "calibrated", max_model_len=named.max_model_len)
    config = engine_config(target, num_ranks)
    length = config.model.max_model_len or 0
    base = named if named is not None else _shipped(target, config, num_ranks)
    if base is not None:
        plan = _plan(config)
        length = base.max_model_len
        if (plan.needs.formats, plan.needs.kv_dtype) == (base.dtype, base.kv_dtype):
            return Deployment(target, base, "calibrated", max_model_len=length)
        return Deployment(target, _changed(base, target, config), "changed", max_model_len=length)
    if target.sheet is None:
        raise ConfigError(
            "The calibration's device is not known by a data sheet, so that nothing else can be said of it."
        )
    calibration, _ = data_sheet_calibration(config, target.sheet)
    return Deployment(target, calibration, "data sheet", Link(gb_s=target.sheet.link_gb_s), length)


def _changes(options: Mapping[str, Any]) -> bool:
    """Whether options change what a calibration has measured."""
    return any(options.get(name) not in (None, "auto") for name in ("dtype", "quantization", "kv_cache_dtype"))


def _shipped(target: Target, config: EngineConfig, num_ranks: int) -> Calibration | None:
    """The shipped calibration that is nearest: in the same formats, or else in bfloat16. It has to be long enough."""
    if not target.uses_calibrations or target.sheet is None or not target.sheet.calibrated_as:
        return None
    needs = _plan(config).needs
    wanted = (needs.formats, needs.kv_dtype)
    found = [
        one
        for one in map(Calibration.load, shipped_machines().values())
        if (one.model, one.device_name, one.tensor_parallel_size)
        == (target.model, target.sheet.calibrated_as, num_ranks)
        and one.max_model_len >= max(target.longest, target.options.get("max_model_len") or 0)
    ]
    same = [one for one in found if (one.dtype, one.kv_dtype) == wanted]
    plain = [one for one in found if (one.dtype, one.kv_dtype) == ("bfloat16", "bfloat16")]
    return next(iter([*same, *plain]), None)


def _changed(base: Calibration, target: Target, config: EngineConfig) -> Calibration:
    """A calibration in other formats, by what the data sheet says of the difference in time and in memory."""
    sheet = target.sheet or device_calibrated_as(base.device_name)
    if sheet is None:
        raise ConfigError(
            f"What other number formats change on '{base.device_name}' is only known by a data sheet, and there is "
            "none: calibrate with them."
        )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=base.max_model_len))
    old_config = config_of(base)
    before, after = _plan(old_config), _plan(config)
    costs = [
        data_sheet_cost(rank_costs(plan, weight_format_of(one)), sheet)
        for plan, one in ((before, old_config), (after, config))
    ]
    freed = before.needs.weight_bytes - after.needs.weight_bytes
    bytes_per_block = base.block_size * after.needs.kv_bytes_per_token
    most = (base.scheduler.get("max_num_seqs") or 256) * -(-base.max_model_len // base.block_size)
    num_blocks = min((base.num_blocks * base.bytes_per_block + freed) // bytes_per_block, most)
    return dataclasses.replace(
        base,
        cost=moved(base.cost, costs[0], costs[1]),
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        dtype=after.needs.formats,
        kv_dtype=after.needs.kv_dtype,
        cache={**base.cache, **{name: getattr(config.cache, name) for name in CACHE_OPTIONS}},
        verified=None,
    )


def fitting(target: Target, given_ranks: int | None) -> list[Deployment]:
    """Replicas on 1, 2, 4 and 8 devices, those on which the model fits, the fewest first; or that on the given number.
    `ConfigError` if it fits on none."""
    if target.calibration is not None:
        return [deploy(target, given_ranks or target.calibration.tensor_parallel_size)]
    if given_ranks is not None:
        return [deploy(target, given_ranks)]
    found, reason, number = list[Deployment](), None, 1
    while number <= BOUNDS.most_ranks:
        try:
            found.append(deploy(target, number))
        except DoesNotFit as error:
            reason = error
        except ConfigError:
            if number == 1:
                raise
        number *= 2
    if not found:
        raise ConfigError(
            f"{target.model} fits on no number of devices (up to {BOUNDS.most_ranks} × {target.device_name}). {reason} "
            "Quantise it (--quantization int4), lower --max-model-len, or name a device with more memory."
        )
    return found
