"""The statistics of an engine, composed of the records that its parts count in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from headway.core.kv.host_tier import HostTierStats
from headway.core.kv.prefix_cache import PrefixCacheStats
from headway.core.speculation import SpeculationStats
from headway.core.token_time import TokenTimeStats
from headway.core.utilisation import UtilisationStats
from headway.counters import Counter, Gauge, Statistics

StepKind = Literal["decode", "prefill", "mixed"]
"""decode: one token for each request · prefill: chunks of prompts only · mixed: both."""


class StepStats(Statistics):
    """The last step."""

    duration_s: float = 0.0
    schedule_s: float = 0.0
    """The planning time for it."""
    kind: StepKind = "decode"
    num_tokens: int = 0
    """Tokens that it computed."""
    prompt_token_s: float = 0.0
    """Seconds that a prompt token adds to a step, learnt from past steps; 0: not known."""


class BatchStats(Statistics):
    """The state and the counters of the queue and the batch."""

    num_running: Annotated[int, Gauge("num_requests_running", "Sequences in the batch.", by_replica=True)] = 0
    num_waiting: Annotated[int, Gauge("num_requests_waiting", "Sequences in the engine's queue.", by_replica=True)] = 0
    num_fetching: Annotated[int, Gauge("requests_fetching", "Waiting sequences whose blocks are fetched.")] = 0
    num_steps: Annotated[int, Counter("engine_steps", "Steps of the engine.")] = 0
    num_preemptions: Annotated[int, Counter("num_preemptions", "Times a request lost its blocks to another.")] = 0
    num_recomputed_tokens: Annotated[int, Counter("recomputed_tokens", "Tokens computed again after a preemption.")] = 0
    """Tokens that preempted requests had in the cache and lost."""
    prompt_tokens: Annotated[int, Counter("prompt_tokens", "Prompt tokens taken in.", of_requests=True)] = 0
    """Counted when a request enters the batch for the first time."""
    generation_tokens: Annotated[
        int, Counter("generation_tokens", "Tokens generated.", of_requests=True, by_replica=True)
    ] = 0
    num_saved_tokens: Annotated[
        int,
        Counter("prefix_cache_saved_tokens", "Prompt tokens that did not have to be computed.", of_requests=True),
    ] = 0
    """Found by requests that entered the batch for the first time."""


class BlockStats(Statistics):
    """The blocks of the device. Each is free, used or cached."""

    num_free_blocks: Annotated[int, Gauge("kv_blocks_free", "KV blocks without contents.")] = 0
    num_used_blocks: Annotated[int, Gauge("kv_blocks_live", "KV blocks held by requests.", by_replica=True)] = 0
    num_cached_blocks: Annotated[
        int, Gauge("kv_blocks_cached", "KV blocks that no request holds, kept by the prefix cache.")
    ] = 0
    num_used_slots: Annotated[int, Gauge()] = 0
    """KV slots that hold a token; the rest of the used blocks is waste."""
    num_table_entries: Annotated[int, Gauge()] = 0
    """The entries of all block tables: a block counts once for every request that holds it."""


class TransferStats(Statistics):
    """Blocks that go from engines that compute prompts to those that answer."""

    num_sent_blocks: Annotated[int, Counter("kv_blocks_sent", "KV blocks sent to decode replicas.")] = 0
    num_early_blocks: Annotated[
        int,
        Counter("kv_blocks_sent_early", "KV blocks sent to decode replicas before their prompt was computed in full."),
    ] = 0
    """Blocks whose transfer was hidden by the computation of their prompt."""
    block_s: float = 0.0
    """Seconds to fetch a block from another engine; 0: not known."""


class EngineStats(Statistics):
    """The state of the engine after a step, its counters since it started, and the step itself."""

    step: StepStats = msgspec.field(default_factory=StepStats)
    batch: BatchStats = msgspec.field(default_factory=BatchStats)
    blocks: BlockStats = msgspec.field(default_factory=BlockStats)
    prefix_cache: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    tiers: HostTierStats = msgspec.field(default_factory=HostTierStats)
    drafts: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
    transfers: TransferStats = msgspec.field(default_factory=TransferStats)
    token_time: TokenTimeStats = msgspec.field(default_factory=TokenTimeStats)
    utilisation: UtilisationStats = msgspec.field(default_factory=UtilisationStats)


def summed(each: Iterable[EngineStats]) -> EngineStats:
    """The statistics of several engines together, without those of their last steps."""
    total = EngineStats()
    for stats in each:
        total.add(stats)
    return total
