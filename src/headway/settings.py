"""What the options came to on a kind of device: the records that the engine reads, made by `headway.config`.

A record here has nothing left open that the options and the device decide. What a checkpoint or free memory decides is
still open in some fields, and settled by `headway.worker.formats` and `headway.worker.memory_plan`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

MAX_DRAFT_TOKENS = 64
"""Of one request, in a step."""
MAX_DRAFTED_LINES = 256
"""With more than so many tokens in a step, even the largest devices compute longer than they read weights."""
GraphMode = Literal["off", "lazy", "all"]
"""Which CUDA graphs are made: none, those of steps that come up twice, or those of all steps before the first."""


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """`CacheConfig` on a kind of device. The options that are still open are settled by `headway.worker`."""

    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    num_kv_blocks: int | None
    host_cache_memory: int | None
    arrival_memory: int | None
    disk_cache: str
    """Empty: none."""
    disk_cache_size: int
    enable_prefix_caching: bool
    eviction_policy: str
    kv_allocation: str
    kv_cache_dtype: str

    @property
    def shares_prefixes(self) -> bool:
        """Whether there is a prefix cache."""
        return self.enable_prefix_caching and self.kv_allocation == "paged"


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """`SchedulerConfig` on a kind of device, with nothing left open: all that a scheduler takes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    target_itl_ms: float
    """0: none."""
    max_chunk_tokens: int
    short_prompt_share: float
    long_prompt_step_ms: float
    """0: a long prompt does not limit a step either."""
    full_step_tokens: int
    """With fewer tokens a step leaves much of the device idle: behind a long context it would take as long."""
    scheduling_policy: str
    batching: str
    batch_window_ms: float
    prefill_mode: str
    starvation_ms: float
    starvation_stretch: float
    max_preemptions: int
    max_head_skips: int
    preemption_mode: str
    """May stay "auto": that is decided for each request."""
    skip_window: int
    speculation: str
    """"off", "ngram" or "draft"."""
    max_draft_tokens: int
    spec_synthetic_acceptance: float
    """0: guesses are real."""

    @property
    def synthetic_chance(self) -> float | None:
        """With synthetic acceptance: how likely a guess is accepted if those before it were, so that a request with
        `max_draft_tokens` of them gets as many tokens a step as wanted, in the mean."""
        wanted = self.spec_synthetic_acceptance
        if not wanted:
            return None
        low, high = 0.0, 1.0
        for _ in range(50):
            chance = (low + high) / 2
            mean = sum(chance**place for place in range(self.max_draft_tokens + 1))
            low, high = (chance, high) if mean < wanted else (low, chance)
        return low

    @property
    def max_num_lines(self) -> int:
        """Most places that a step chooses tokens at: one for each request, and one for each guess that it verifies."""
        if self.speculation == "off":
            return self.max_num_seqs
        most = min(self.max_num_seqs * (1 + self.max_draft_tokens), MAX_DRAFTED_LINES, self.max_num_batched_tokens)
        return max(self.max_num_seqs, most)

    def as_options(self) -> dict[str, Any]:
        """Options of a `SchedulerConfig` that resolves to this. A chunk limit that limits nothing is left open, so
        that it grows with the step's."""
        options = dataclasses.asdict(self)
        del options["full_step_tokens"]  # the device's
        if self.max_chunk_tokens == self.max_num_batched_tokens:
            options["max_chunk_tokens"] = None
        return options


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """`DeviceConfig` on a kind of device. Kernels and threads that are still open are settled by `headway.worker`."""

    kind: str
    """Of the device: "cpu" or "cuda"."""
    num_threads: int | None
    attention_backend: str
    graphs: GraphMode
    async_scheduling: bool
    tensor_parallel_size: int = 1
    collectives: str = "auto"
