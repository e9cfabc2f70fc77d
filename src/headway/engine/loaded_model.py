"""Lets one loaded model be scheduled in several ways.

`LoadedModel` gives a loaded model another scheduler, so that policies, batching modes and limits can be compared
without loading again. The model, the device and the format of KV blocks cannot change. The number of blocks, the
longest request and the limits of a step can only shrink, because buffers and CUDA graphs keep the size they were made
with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from headway.config import CacheConfig, ResolvedConfig, SchedulerConfig, check_names
from headway.engine.llm_engine import LLMEngine
from headway.errors import ConfigError

FREE_CACHE_OPTIONS = ("enable_prefix_caching", "eviction_policy", "kv_allocation")
"""Cache options that do not affect the memory layout, and so can change."""


class LoadedModel:
    """Takes ownership of an engine, whose configuration sets the limits for changes. Shut down this object, not its
    engines."""

    def __init__(self, engine: LLMEngine) -> None:
        self.config, self.plan = engine.config, engine.plan
        self.engine = engine
        """The engine made by the latest `reschedule`, or the original one."""

    def reschedule(
        self, *, num_blocks: int | None = None, max_model_len: int | None = None, **options: Any
    ) -> LLMEngine:
        """Return an engine whose scheduler and cache have these options in place of the original ones. It uses
        `num_blocks` of the blocks and accepts requests of up to `max_model_len` tokens. The previous engine must be
        idle and must not be used any more. Raises `ConfigError` for what cannot change."""
        before, plan = self.engine, self.plan
        if before.has_unfinished_requests():
            raise ConfigError("An engine with unfinished requests cannot get another scheduler.")
        before.core.drain()
        self.engine = LLMEngine(
            _changed(self.config, options),
            executor=before.executor,
            tokenizer=before.tokenizer,
            model_config=before.model_config,
            plan=dataclasses.replace(
                plan,
                num_blocks=_at_most("num_blocks", num_blocks, plan.num_blocks),
                max_model_len=_at_most("max_model_len", max_model_len, plan.max_model_len),
            ),
        )
        self.engine.core.scheduler.inherit(before.core.scheduler)
        return self.engine

    def shutdown(self) -> None:
        """Free the model."""
        self.engine.shutdown()


def _changed(config: ResolvedConfig, options: dict[str, Any]) -> ResolvedConfig:
    check_names(options)
    in_scheduler = {field.name for field in dataclasses.fields(SchedulerConfig)}
    scheduler, cache = config.scheduler.as_options(), dataclasses.asdict(config.cache)
    for name, value in options.items():
        if name in in_scheduler:
            scheduler[name] = value
        elif name in FREE_CACHE_OPTIONS:
            cache[name] = value
        else:
            raise ConfigError(f"'{name}' cannot be changed once the model is loaded.")
    changed = dataclasses.replace(
        config,
        scheduler=SchedulerConfig(**scheduler).resolve(config.device.kind),
        cache=CacheConfig(**cache).resolve(config.device.kind),
    )
    if changed.scheduler.speculation != config.scheduler.speculation and changed.scheduler.speculation != "off":
        raise ConfigError(
            f"speculation cannot become '{changed.scheduler.speculation}' once the model is loaded: load it so."
        )
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_lines"):
        _at_most(name, *(getattr(one.scheduler, name) for one in (changed, config)))
    return changed


def _at_most(name: str, wanted: int | None, largest: int) -> int:
    if wanted is not None and wanted > largest:
        raise ConfigError(f"{name} cannot grow from {largest} to {wanted} once the model is loaded.")
    return largest if wanted is None else wanted
