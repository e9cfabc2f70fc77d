"""The scheduling core: it turns requests into `SchedulerOutput`. It has no tensors, no clock and no I/O.

It uses only the standard library. The engine, the simulator and tests get the same schedule for the same calls.
"""

from headway.core.invariants import check_invariants
from headway.core.kv.blocks import BlockPool
from headway.core.kv.disk_index import DiskIndex
from headway.core.kv.eviction import EvictionPolicy, create_eviction_policy
from headway.core.kv.host_tier import HostTier
from headway.core.kv.manager import KVCacheManager
from headway.core.kv.prefix_cache import PrefixCache, PrefixCacheStats
from headway.core.policy import POLICIES, SchedulingPolicy, create_policy
from headway.core.request import Request, RequestStatus
from headway.core.scheduler import Scheduler
from headway.core.scheduler_output import (
    ModelRunnerOutput,
    NewRequest,
    PooledPrompt,
    PromptLogprobs,
    RequestUpdate,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)

__all__ = [
    "POLICIES",
    "BlockPool",
    "DiskIndex",
    "EvictionPolicy",
    "HostTier",
    "KVCacheManager",
    "ModelRunnerOutput",
    "NewRequest",
    "PrefixCache",
    "PrefixCacheStats",
    "PooledPrompt",
    "PromptLogprobs",
    "Request",
    "RequestStatus",
    "RequestUpdate",
    "SampledTokens",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerOutput",
    "SchedulingPolicy",
    "TokenLogprobs",
    "check_invariants",
    "create_eviction_policy",
    "create_policy",
]
