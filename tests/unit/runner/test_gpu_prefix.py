"""The prefix cache on the GPU runner: rows that begin with blocks of others, copies of blocks, blocks from the host.

Without a GPU its kernels run in Triton's interpreter, one program at a time: prompts are short and requests few.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.triton_device import ON_GPU, choose  # isort: split

from headway import LLM, SamplingParams
from tests.integration.conversations import Alone, Conversations, greedy
from tests.unit.runner.tiny_llm import VOCAB_SIZE, TinyLLM, random_prompts

MAX_TOKENS = 6
NO_PADDING: dict[str, Any] = {} if ON_GPU else {"enforce_eager": True}  # the interpreter computes it line by line

VARIANTS: dict[str, dict[str, Any]] = {
    "blocks of 1": {"block_size": 1, "async_scheduling": True},
    "blocks of 4, graphs": {"block_size": 4, "cuda_graph_capture": "start"},
    "blocks of 16": {"block_size": 16, "max_chunk_tokens": 5, "async_scheduling": True},
    "blocks of 64": {"block_size": 64},
    "a cache that is too small": {"block_size": 2, "num_kv_blocks": 9, "async_scheduling": True},
}


@pytest.fixture(scope="module")
def alone(tiny: TinyLLM) -> Alone:
    return Alone(tiny.on_cpu(enable_prefix_caching=False), MAX_TOKENS)


@pytest.fixture(scope="module")
def llm(tiny: TinyLLM) -> LLM:
    return tiny.on_gpu(block_size=4, async_scheduling=True, **NO_PADDING)


@pytest.mark.parametrize(
    "variant", choose(VARIANTS, "blocks of 4, graphs", "blocks of 16", "a cache that is too small")
)
def test_tokens_are_those_of_each_request_alone(tiny: TinyLLM, alone: Alone, variant: str) -> None:
    """A prompt; then another turn, a branch and the same again, all at once."""
    llm = tiny.on_gpu(**NO_PADDING | VARIANTS[variant])
    (prompt,) = random_prompts(9)
    (first,) = llm.generate(prompt, greedy(2), use_tqdm=False)
    prompts = [[*prompt, *first.outputs[0].token_ids, 5], [*prompt[:6], 7], prompt]
    outputs = llm.generate(prompts, greedy(2), use_tqdm=False)
    llm.engine.check_invariants()
    for output in (first, *outputs):
        assert output.outputs[0].token_ids == alone.answer(tuple(output.prompt_token_ids))[:2]
    if variant not in ("blocks of 64", "a cache that is too small"):
        assert outputs[0].num_cached_tokens == 10, "nothing but the last token of the answer, and what is new"


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_of_random_conversations_are_those_of_each_request_alone(
    tiny: TinyLLM, alone: Alone, variant: str
) -> None:
    llm = tiny.on_gpu(**{**VARIANTS[variant], "num_kv_blocks": 64})
    talk = Conversations(llm, random.Random(1), vocab_size=VOCAB_SIZE, max_prompt=18, max_tokens=MAX_TOKENS)
    alone.check(talk.run(60))


def test_blocks_come_back_from_the_host(tiny: TinyLLM, alone: Alone) -> None:
    llm = tiny.on_gpu(**NO_PADDING, block_size=4, num_kv_blocks=4, host_cache_memory=2**18, async_scheduling=True)
    # So small a model computes a block faster than it is copied.
    llm.engine.core.scheduler.kv_cache.restore_block_s = 0.0
    prompt, other = random_prompts(13, 12)
    outputs = [llm.generate(tokens, greedy(2), use_tqdm=False)[0] for tokens in (prompt, other, prompt)]
    for output in outputs:
        assert output.outputs[0].token_ids == alone.answer(tuple(output.prompt_token_ids))[:2]
    tiers = llm.engine.core.scheduler.kv_cache.tiers
    assert tiers is not None and tiers.host.stats.num_moved_in_blocks == 3
    assert outputs[2].num_cached_tokens == 12


def test_the_next_turn_starts_from_the_answer_and_a_copy_of_its_tail(llm: LLM, alone: Alone) -> None:
    (prompt,) = random_prompts(10)
    (first,) = llm.generate(prompt, greedy(MAX_TOKENS), use_tqdm=False)
    history = [*prompt, *first.outputs[0].token_ids, 5]
    (second,) = llm.generate(history, greedy(MAX_TOKENS), use_tqdm=False)
    assert second.num_cached_tokens == 15, "three full blocks and three tokens of the fourth"
    assert first.outputs[0].token_ids == alone.answer(tuple(prompt))
    assert second.outputs[0].token_ids == alone.answer(tuple(history))


def test_penalties_count_the_tokens_that_were_not_computed_again(llm: LLM, tiny: TinyLLM) -> None:
    (prompt,) = random_prompts(9)
    params = SamplingParams(temperature=0, max_tokens=2, repetition_penalty=1.5, presence_penalty=0.5)
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
    (expected,) = tiny.on_cpu(enable_prefix_caching=False).generate(prompt, params, use_tqdm=False)
    assert outputs[1].num_cached_tokens >= 8
    assert [output.outputs[0].token_ids for output in outputs] == [expected.outputs[0].token_ids] * 2


def test_prompt_logprobs_are_complete(llm: LLM, tiny: TinyLLM) -> None:
    (prompt,) = random_prompts(9)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    llm.generate(prompt, greedy(2), use_tqdm=False)
    (found,) = llm.generate(prompt, params, use_tqdm=False)
    (expected,) = tiny.on_cpu(enable_prefix_caching=False).generate(prompt, params, use_tqdm=False)
    assert found.num_cached_tokens == 0
    assert found.prompt_logprobs is not None and expected.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == len(prompt)
    for token, one, other in zip(prompt[1:], found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert one is not None and other is not None
        assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
