"""Another scheduler for a model that is loaded: policies, batching modes and limits are compared without loading again.

What the scheduler and the cache decide can change. What memory was laid out for can not: the model, the device, the
format and number of KV blocks; and limits of a step can only become smaller, since its buffers and graphs are as large
as they were made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from headway.config import EngineConfig, SchedulerConfig
from headway.engine.llm_engine import LLMEngine
from headway.errors import ConfigError

FREE_CACHE_OPTIONS = ("prefix_caching", "eviction_policy", "kv_allocation")
"""Options of the cache that its memory does not depend on."""


def reschedule(engine: LLMEngine, **options: Any) -> LLMEngine:
    """An engine with the same loaded model and these options of scheduler and cache in place of its own. The engine
    that is given must be idle, and is not to be used any more; only the last one is to be shut down."""
    if engine.has_unfinished_requests():
        raise ConfigError("An engine with unfinished requests cannot get another scheduler.")
    engine.core.drain()
    renewed = LLMEngine(
        _changed(engine.config, options),
        executor=engine.core.executor,
        tokenizer=engine.tokenizer,
        model_config=engine.model_config,
        plan=engine.plan,
    )
    renewed.core.scheduler.inherit(engine.core.scheduler)
    return renewed


def _changed(config: EngineConfig, options: dict[str, Any]) -> EngineConfig:
    in_scheduler = {field.name for field in dataclasses.fields(SchedulerConfig)}
    scheduler: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    for name, value in options.items():
        if name in in_scheduler:
            scheduler[name] = value
        elif name in FREE_CACHE_OPTIONS:
            cache[name] = value
        else:
            raise ConfigError(f"'{name}' cannot be changed once the model is loaded.")
    changed = dataclasses.replace(
        config,
        scheduler=dataclasses.replace(config.scheduler, **scheduler),
        cache=dataclasses.replace(config.cache, **cache),
    )
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        wanted, largest = (getattr(one.scheduler.limits, name) for one in (changed, config))
        if wanted > largest:
            raise ConfigError(f"{name} cannot grow from {largest} to {wanted} once the model is loaded.")
    return changed
