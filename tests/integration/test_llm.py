"""The offline API on the embedded model in its fast default mode: what users may ask, and what they may get wrong."""

from __future__ import annotations

import itertools
import math
import signal

import pytest

from headway import LLM, InvalidRequestError, SamplingParams
from headway.errors import ConfigError, RequestTooLargeError
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


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5)]
    outputs = llm.generate(list(PROMPTS[:3]), params, use_tqdm=False)
    assert [output.prompt for output in outputs] == list(PROMPTS[:3])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]


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


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_sealed_batches_give_the_same_answers_where_these_end_by_themselves(llm: LLM, batching: str) -> None:
    questions = ["Say hello in one short sentence.", "What is the capital of France?", "Name a colour."]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    wanted = SamplingParams(temperature=0, max_tokens=60)
    expected = llm.chat(conversations, wanted, use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in expected} == {"stop"}
    sealed = LLM(max_model_len=1024, batching=batching)
    outputs = sealed.chat(conversations, wanted, use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM) -> None:
    """Ctrl-C, a little later each time."""
    expected = one(llm, PROMPTS[4], GREEDY).outputs
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for count in range(12):
            signal.setitimer(signal.ITIMER_REAL, 0.003 * (count + 1))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(list(PROMPTS[:8]), SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
            assert not llm.engine.has_unfinished_requests()
            llm.engine.check_invariants()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert one(llm, PROMPTS[4], GREEDY).outputs == expected


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_any_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.95, seed=42, max_tokens=16)
    alone = one(llm, PROMPTS[4], seeded).outputs[0].token_ids
    noise = SamplingParams(temperature=1.0, max_tokens=10)
    crowd = llm.generate([*PROMPTS[:6], PROMPTS[4]], [*[noise] * 6, seeded], use_tqdm=False)
    assert crowd[-1].outputs[0].token_ids == alone
    other_seed = SamplingParams(temperature=1.0, top_p=0.95, seed=43, max_tokens=16)
    assert one(llm, PROMPTS[4], other_seed).outputs[0].token_ids != alone


def test_unseeded_requests_differ_from_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    first, second = llm.generate([PROMPTS[4]] * 2, params, use_tqdm=False)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_n_gives_that_many_different_completions_and_a_seed_makes_them_repeatable(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12)
    first, again = one(llm, PROMPTS[4], params), one(llm, PROMPTS[4], params)
    tokens = [completion.token_ids for completion in first.outputs]
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(t) for t in tokens}) == 4
    assert tokens == [completion.token_ids for completion in again.outputs]


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


def test_a_stop_token_ends_the_request_and_is_named(llm: LLM) -> None:
    free = one(llm, PROMPTS[4], GREEDY).outputs[0].token_ids
    token = next(t for i, t in enumerate(free) if i > 2 and t not in free[:i])
    stopped = one(llm, PROMPTS[4], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[token])).outputs[0]
    assert stopped.token_ids == free[: free.index(token) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)


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
    whole = one(llm, PASSAGE, params)
    assert whole.prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None
    assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids)
    for token, position in zip(whole.prompt_token_ids[1:], whole.prompt_logprobs[1:], strict=True):
        assert position is not None
        assert token in position
    chunked = one(LLM(max_model_len=1024, max_chunk_tokens=9), PASSAGE, params)
    assert chunked.prompt_logprobs == whole.prompt_logprobs


def test_streaming_grows_to_the_same_text(llm: LLM) -> None:
    texts = [output.outputs[0].text for output in llm.stream(PROMPTS[4], GREEDY)]
    assert len(texts) == 12
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == one(llm, PROMPTS[4], GREEDY).outputs[0].text


def test_leaving_a_stream_early_aborts_the_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[4], SamplingParams(max_tokens=500))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()


def test_abort_gives_what_there_was_and_frees_the_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[4], SamplingParams(temperature=0, max_tokens=500), request_id="mine")
    seen = [next(stream) for _ in range(3)]
    last = llm.abort("mine")
    assert last is not None
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids == seen[-1].outputs[0].token_ids
    assert llm.abort("mine") is None
    assert list(stream) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, -1], "outside the vocabulary"),
        ([1, 49152], "outside the vocabulary"),
        ([1, 2.5], "whole numbers"),
        ([1, True], "whole numbers"),
        ([1] * 1024, "at most 1023 fit"),
        (b"bytes", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_queued(llm: LLM, prompt, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.engine.add_request("bad", prompt, GREEDY)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 10**30},
        {"min_tokens": 20, "max_tokens": 10},
        {"logit_bias": {1: float("nan")}},
        {"stop": [""]},
        {"seed": 1 << 70},
        {"n": 10**6},
        {"temprature": 1.0},
    ],
)
def test_bad_parameters_are_refused_and_named(options: dict) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    assert caught.value.param in options


def test_one_bad_prompt_among_many_stops_nothing_but_the_call(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[4], GREEDY)
    next(stream)
    with pytest.raises(InvalidRequestError):
        llm.generate([PROMPTS[0], [10**9]], GREEDY, use_tqdm=False)
    rest = list(stream)
    assert rest[-1].finished
    assert rest[-1].outputs[0].text == one(llm, PROMPTS[4], GREEDY).outputs[0].text


def test_parameters_that_do_not_fit_the_vocabulary_are_refused(llm: LLM) -> None:
    for options in ({"logit_bias": {49152: 1.0}}, {"stop_token_ids": [10**6]}):
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            llm.generate(PROMPTS[0], SamplingParams(**options), use_tqdm=False)


def test_a_request_that_can_never_fit_into_the_cache_is_refused() -> None:
    small = LLM(max_model_len=1024, num_kv_blocks=4)
    with pytest.raises(RequestTooLargeError, match="whole cache holds 64"):
        small.generate([1] * 60, SamplingParams(max_tokens=10), use_tqdm=False)


def test_without_a_limit_the_output_goes_on_until_the_context_is_full() -> None:
    small = LLM(num_kv_blocks=8)
    (output,) = small.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8 * 16 - 3
    assert output.outputs[0].finish_reason == "length"


def test_unknown_options_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_model_len'"):
        LLM(max_modellen=12)
    with pytest.raises(ConfigError, match="cannot be combined"):
        LLM(quantization="int8", dtype="bfloat16")
    with pytest.raises(ConfigError, match="8192 positions"):
        LLM(max_model_len=100_000)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.errors import RequestFailedError
    from headway.executor.local import LocalExecutor

    def broken(self, output):
        raise RuntimeError("the kernel caught fire")

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "submit", broken)
        with pytest.raises(RequestFailedError, match="caught fire"):
            llm.generate(list(PROMPTS[:3]), GREEDY, use_tqdm=False)
    assert "Paris" in one(llm, PROMPTS[0], GREEDY).outputs[0].text
