"""The offline API on the embedded model in its fast default mode. What is refused and how calls end is in
tests/unit/engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.errors import RequestTooLargeError
from tests.integration.conversations import MAX_MODEL_LEN
from tests.integration.greedy import run
from tests.integration.prompts import PASSAGE, PROMPTS

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=1024)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM):
    yield
    llm.engine.check_invariants()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.core.scheduler.kv_cache.num_used_blocks == 0


def one(llm: LLM, prompt, params: SamplingParams):
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def test_text_and_token_ids_give_the_same_answer(llm: LLM) -> None:
    text = "The capital of France is"
    by_text = one(llm, text, GREEDY)
    by_ids = one(llm, llm.get_tokenizer().encode(text), GREEDY)
    assert "Paris" in by_text.outputs[0].text
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_text.prompt == text
    assert by_ids.prompt is None
    assert by_text.outputs[0].finish_reason == "length"


def test_chat_uses_the_models_template_and_stops_by_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello in one short sentence."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    assert "<|im_end|>" not in output.outputs[0].text
    assert llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False).count("<|im_start|>") == 3


def test_the_fast_mode_gives_the_same_tokens_in_any_batch_and_chunking(llm: LLM) -> None:
    """To the bit: the logarithms of their probabilities are the same, too."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
    together = [o.outputs for o in llm.generate(list(PROMPTS[:16]), params, use_tqdm=False)]
    assert [one(llm, prompt, params).outputs for prompt in PROMPTS[:16]] == together
    other = LLM(max_model_len=1024, max_chunk_tokens=5, block_size=32, num_kv_blocks=24, max_num_seqs=5)
    outputs = other.generate(list(PROMPTS[:16]), params, use_tqdm=False)
    assert [o.outputs for o in outputs] == together


def test_overlapping_steps_give_the_same_tokens_also_when_requests_have_to_give_way(llm: LLM) -> None:
    texts = [one(llm, prompt, GREEDY).outputs[0].text for prompt in PROMPTS[:4]]
    expected = run(llm, PROMPTS[:12], num_tokens=24)
    overlapped = LLM(max_model_len=1024, async_scheduling=True, block_size=4, num_kv_blocks=40, max_num_seqs=8)
    result = run(overlapped, PROMPTS[:12], num_tokens=24)
    assert result.tokens == expected.tokens
    assert result.num_preemptions >= 2
    assert [one(overlapped, prompt, GREEDY).outputs[0].text for prompt in PROMPTS[:4]] == texts


def test_stop_strings_stop_tokens_and_aborts_while_steps_overlap(llm: LLM) -> None:
    overlapped = LLM(max_model_len=1024, async_scheduling=True)
    free = one(llm, PROMPTS[4], SamplingParams(temperature=0, max_tokens=30)).outputs[0]
    stop = free.text[len(free.text) // 2 :][:9]
    for params in (
        SamplingParams(temperature=0, max_tokens=30, stop=[stop]),
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[free.token_ids[5]]),
        SamplingParams(temperature=1.0, seed=3, max_tokens=30, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=1),
    ):
        assert one(overlapped, PROMPTS[4], params).outputs == one(llm, PROMPTS[4], params).outputs
    stream = overlapped.stream(PROMPTS[4], SamplingParams(max_tokens=500), request_id="mine")
    next(stream)
    stream.close()
    again = list(overlapped.stream(PROMPTS[4], GREEDY, request_id="mine"))  # the step of the first one is still out
    assert again[-1].outputs == one(llm, PROMPTS[4], GREEDY).outputs
    overlapped.engine.check_invariants()


def test_seeds(llm: LLM) -> None:
    """Alone and in any batch; those without one differ, and so do several completions of one."""
    drawn = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 16}
    seeded, noise = SamplingParams(seed=42, **drawn), SamplingParams(temperature=1.0, max_tokens=10)
    alone = one(llm, PROMPTS[4], seeded).outputs[0].token_ids
    crowd = llm.generate([*[PROMPTS[4]] * 6, PROMPTS[4]], [*[noise] * 6, seeded], use_tqdm=False)
    assert crowd[-1].outputs[0].token_ids == alone
    assert len({tuple(output.outputs[0].token_ids) for output in crowd}) == 7
    several = one(llm, PROMPTS[4], SamplingParams(n=4, seed=7, **drawn)).outputs
    assert [completion.index for completion in several] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in several} | {tuple(alone)}) == 5


def test_a_stop_string_ends_the_text_also_across_tokens(llm: LLM) -> None:
    free = one(llm, PROMPTS[4], SamplingParams(temperature=0, max_tokens=30)).outputs[0]
    start = len(free.text) // 2
    stop = free.text[start : start + 9]  # cuts through words and tokens
    stopped = one(llm, PROMPTS[4], SamplingParams(temperature=0, max_tokens=30, stop=[stop])).outputs[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    params = SamplingParams(temperature=0, max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert one(llm, PROMPTS[4], params).outputs[0].text == free.text[: free.text.index(stop) + len(stop)]


def test_min_tokens_bad_words_and_logit_bias_are_honoured(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello in one short sentence."}]
    params = SamplingParams(temperature=0, max_tokens=60, min_tokens=40)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 40
    params = SamplingParams(temperature=0, max_tokens=12, bad_words=["Paris"])
    assert "Paris" not in one(llm, PROMPTS[0], params).outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={1000: 100.0})
    assert one(llm, PROMPTS[0], params).outputs[0].token_ids == [1000] * 5


def test_logprobs_belong_to_the_tokens_and_sum_up(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, logprobs=3)).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 6
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        assert position[token].rank == 1
        assert len(position) == 3
        assert sum(math.exp(entry.logprob) for entry in position.values()) <= 1.0 + 1e-6
    total = sum(position[t].logprob for t, position in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_are_the_same_in_one_chunk_and_in_many(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    whole = one(llm, PASSAGE, params).prompt_logprobs
    assert whole is not None and whole[0] is None
    assert one(LLM(max_model_len=1024, max_chunk_tokens=9), PASSAGE, params).prompt_logprobs == whole


def test_where_the_cache_or_the_context_ends(tiny: Any) -> None:
    """A request that can never fit is refused; one without a limit goes on until the context is full."""
    with pytest.raises(RequestTooLargeError, match="whole cache holds 32"):
        tiny.on_cpu(num_kv_blocks=8, block_size=4).generate([1] * 30, SamplingParams(max_tokens=10), use_tqdm=False)
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = tiny.on_cpu().generate([1, 2, 3], endless, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == MAX_MODEL_LEN - 3
    assert output.outputs[0].finish_reason == "length"
