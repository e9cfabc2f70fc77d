"""The settings that the engine reads: `headway.config` makes them from the options and the kind of device.

Everything that the options and the kind of device decide is filled in. Some fields depend on the checkpoint or on free
memory; they are filled in later by `headway.worker.formats` and `headway.worker.memory_plan`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

MAX_DRAFT_TOKENS = 64
"""The most drafted tokens of one request in a step."""
MAX_DRAFTED_LINES = 256
"""The most lines of a step with drafts. Beyond it even the largest devices are bound by compute, not by reading
weights."""
GraphMode = Literal["off", "lazy", "all"]
"""Which CUDA graphs are captured: none, those of step shapes seen twice, or those of all shapes before the first step.
"""


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """`CacheConfig` for a kind of device. `headway.worker` fills in the options that are still open."""

    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    num_kv_blocks: int | None
    host_cache_memory: int | None
    arrival_memory: int | None
    disk_cache: str
    """The folder of the disk cache; empty: none."""
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
    """`SchedulerConfig` for a kind of device, with nothing left open: all the options of a scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    target_itl_ms: float
    """0: none."""
    max_chunk_tokens: int
    short_prompt_share: float
    long_prompt_step_ms: float
    """0: long prompts do not limit a step."""
    full_step_tokens: int
    """The tokens that fill the device. A step with fewer leaves much of it idle and, after a long context, takes as
    long."""
    scheduling_policy: str
    batching: str
    batch_window_ms: float
    prefill_mode: str
    starvation_ms: float
    starvation_stretch: float
    max_preemptions: int
    max_head_skips: int
    preemption_mode: str
    """May be "auto": the mode is then decided for each request."""
    skip_window: int
    speculation: str
    """"off", "ngram" or "draft"."""
    max_draft_tokens: int
    spec_synthetic_acceptance: float
    """0: drafts are really verified."""

    @property
    def synthetic_chance(self) -> float | None:
        """With synthetic acceptance: the probability that a draft is accepted if those before it were. It is chosen so
        that a request with `max_draft_tokens` drafts gets the wanted mean number of tokens per step."""
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
        """The most positions that a step samples at: one for each request, and one for each draft that it verifies."""
        if self.speculation == "off":
            return self.max_num_seqs
        most = min(self.max_num_seqs * (1 + self.max_draft_tokens), MAX_DRAFTED_LINES, self.max_num_batched_tokens)
        return max(self.max_num_seqs, most)

    def as_options(self) -> dict[str, Any]:
        """The options of a `SchedulerConfig` that resolves to these settings. A chunk limit without effect is left
        open, so that it grows with the step's limit."""
        options = dataclasses.asdict(self)
        del options["full_step_tokens"]  # decided by the device
        if self.max_chunk_tokens == self.max_num_batched_tokens:
            options["max_chunk_tokens"] = None
        return options


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """`DeviceConfig` for a kind of device. `headway.worker` fills in kernels and threads that are still open."""

    kind: str
    """The kind of device: "cpu" or "cuda"."""
    num_threads: int | None
    attention_backend: str
    graphs: GraphMode
    async_scheduling: bool
    tensor_parallel_size: int = 1
    collectives: str = "auto"
