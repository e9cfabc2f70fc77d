"""Creates a scheduler and its KV cache from the settings, for the engine and for the simulator alike."""

from __future__ import annotations

from typing import Protocol

from headway.core.eras import EraScheduler
from headway.core.kv.eviction import create_eviction_policy
from headway.core.kv.host_tier import HostTier
from headway.core.kv.manager import KVCacheManager
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.scheduler import Scheduler
from headway.settings import CacheSettings, SchedulerSettings


class CacheSize(Protocol):
    """How much room there is for keys and values. `MemoryPlan` and the simulated machine implement this."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_host_slots(self) -> int:
        """How many blocks host memory has room for, besides the cache on the device."""
        ...

    @property
    def restore_block_s(self) -> float:
        """Time to copy one block from host memory back to the device."""
        ...


def create_scheduler(settings: SchedulerSettings, cache: CacheSettings, size: CacheSize) -> Scheduler:
    """Create a scheduler with an empty cache of this size."""
    kv_cache = KVCacheManager(
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        prefix_cache=PrefixCache(create_eviction_policy(cache.eviction_policy)) if cache.shares_prefixes else None,
        host_tier=HostTier(size.num_host_slots) if size.num_host_slots else None,
        restore_block_s=size.restore_block_s,
        reserve_tokens=0 if cache.kv_allocation == "paged" else size.max_model_len,
    )
    return scheduler_of(settings, kv_cache)


def scheduler_of(settings: SchedulerSettings, kv_cache: KVCacheManager) -> Scheduler:
    """Create a scheduler over this cache, which must be empty."""
    is_today = settings.batching == "continuous" and settings.prefill_mode == "chunked"
    return (Scheduler if is_today else EraScheduler)(settings, kv_cache)
