"""`AsyncLLM` and `LLM` with the embedded model: the same tokens, log-probabilities and searches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from headway import LLM, AsyncLLM, RequestOutput, SamplingParams
from headway.outputs import LogprobsOfOnePosition

PROMPTS = ["The capital of France is", "1 2 3 4", "Once upon a time", {"prompt_token_ids": [504, 6376, 281]}]
OPTIONS = {"max_model_len": 512, "num_kv_blocks": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1)
SEEDED = SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=8, bad_words=[" the"])
SEARCH = SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6, temperature=0)
BEST_OF = SamplingParams(temperature=1.0, seed=3, n=2, best_of=4, max_tokens=6)
Logprobs = Sequence[LogprobsOfOnePosition | None] | None
MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    found = LLM(**OPTIONS)
    yield found
    found.shutdown()


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


def test_the_same_as_the_engine_in_this_process(llm: LLM) -> None:
    kinds = [GREEDY, SEEDED, SEARCH, BEST_OF]

    async def ask() -> tuple[list[RequestOutput], RequestOutput]:
        async with AsyncLLM(**OPTIONS) as engine:
            asked = [last(engine.generate(prompt, kind)) for kind in kinds for prompt in PROMPTS]
            every = await asyncio.gather(*asked)
            return every, await last(engine.chat(MESSAGES, GREEDY))

    found, talk = asyncio.run(ask())
    expected = [output for kind in kinds for output in llm.generate(PROMPTS, kind)]
    for ours, theirs in zip([*found, talk], [*expected, *llm.chat(MESSAGES, GREEDY)], strict=True):
        assert ours.finished and ours.prompt == theirs.prompt and ours.prompt_token_ids == theirs.prompt_token_ids
        check_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
        for own, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (own.index, own.token_ids, own.text) == (other.index, other.token_ids, other.text)
            assert (own.finish_reason, own.stop_reason) == (other.finish_reason, other.stop_reason)
            assert own.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
            check_logprobs(own.logprobs, other.logprobs)


def check_logprobs(ours: Logprobs, theirs: Logprobs) -> None:
    assert (ours is None) == (theirs is None)
    for here, there in zip(ours or (), theirs or (), strict=True):
        assert (here is None) == (there is None)
        for (token_id, own), (other_id, other) in zip((here or {}).items(), (there or {}).items(), strict=True):
            assert (token_id, own.rank, own.decoded_token) == (other_id, other.rank, other.decoded_token)
            assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
