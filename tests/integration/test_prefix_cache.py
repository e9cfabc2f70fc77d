"""The prefix cache changes speed only: greedy tokens in float32 are those of each request alone, without a cache."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.integration.conversations import MAX_TOKENS, Alone, Conversations, greedy
from tests.unit.runner.tiny_llm import VOCAB_SIZE, TinyLLM

VARIANTS: dict[str, dict[str, Any]] = {
    "cache off": {"enable_prefix_caching": False},
    "blocks of 1": {"block_size": 1},
    "blocks of 3": {"block_size": 3, "max_chunk_tokens": 7},
    "blocks of 16": {"block_size": 16},
    "blocks of 64": {"block_size": 64, "async_scheduling": True},
    "one token at a time": {"block_size": 4, "max_chunk_tokens": 1, "max_num_batched_tokens": 8},
    "overlapping steps": {"block_size": 5, "async_scheduling": True},
    "by what a block saves": {"block_size": 3, "num_kv_blocks": 60, "eviction_policy": "cost"},
}
TOO_SMALL: dict[str, dict[str, Any]] = {
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 45, "async_scheduling": True},
    "blocks of 3": {"block_size": 3, "num_kv_blocks": 16},
    "blocks of 16": {"block_size": 16, "num_kv_blocks": 5, "max_chunk_tokens": 9, "async_scheduling": True},
    "swapped": {"block_size": 2, "num_kv_blocks": 24, "host_cache_memory": 2**20, "preemption_mode": "swap"},
    "swapped, large blocks": {
        "block_size": 16,
        "num_kv_blocks": 5,
        "host_cache_memory": 2**16,
        "async_scheduling": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_each_request_alone(tiny: TinyLLM, alone: Alone, variant: str) -> None:
    llm = tiny.on_cpu(max_num_seqs=6, **VARIANTS[variant])
    talk = Conversations(llm, random.Random(3), vocab_size=VOCAB_SIZE, max_prompt=120, max_tokens=12)
    turns = talk.run(28)
    alone.check(turns)
    num_cached = sum(turn.num_cached_tokens for turn in turns)
    assert num_cached == 0 if variant == "cache off" else num_cached > 200
    assert any(not turn.finished for turn in turns)


@pytest.mark.parametrize("variant", TOO_SMALL)
def test_tokens_stay_the_same_where_requests_have_to_give_way(tiny: TinyLLM, alone: Alone, variant: str) -> None:
    llm = tiny.on_cpu(max_num_seqs=6, **TOO_SMALL[variant])
    talk = Conversations(llm, random.Random(4), vocab_size=VOCAB_SIZE, max_prompt=20, max_tokens=MAX_TOKENS)
    turns = talk.run(40)
    alone.check(turns)
    assert sum(turn.num_preemptions for turn in turns) >= 1
    kv_cache = llm.engine.core.scheduler.kv_cache
    assert kv_cache.prefix_cache is not None and kv_cache.prefix_cache.stats.num_evicted_blocks >= 10
    assert kv_cache.tiers is None or kv_cache.tiers.host.stats.num_moved_in_blocks >= 2


def test_cached_tokens_are_told(tiny: TinyLLM) -> None:
    llm = tiny.on_cpu(block_size=4)
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(18)]

    def num_cached(tokens: list[int], n: int = 1, **options: Any) -> int:
        return llm.generate(tokens, greedy(5, n), use_tqdm=False, **options)[0].num_cached_tokens

    assert num_cached(prompt) == 0
    assert num_cached(prompt) == 16, "the block after that one ends with the answer"
    assert num_cached(prompt, n=4) == 16
    assert num_cached([*prompt[:9], 1, 2, 3]) == 8
    assert num_cached(prompt, cache_salt="tenant") == 0
    assert num_cached(prompt, cache_salt="tenant") == 16
    (turn,) = llm.generate(prompt[1:], greedy(9), use_tqdm=False)
    assert num_cached([*prompt[1:], *turn.outputs[0].token_ids, 7]) == 17 + 8, "the last token was never computed"
