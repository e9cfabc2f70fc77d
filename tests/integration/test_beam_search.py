"""Beam search with real models: the sequences of transformers, and what is asked for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway import LLM, InvalidRequestError, SamplingParams
from headway.sampling_params import BeamSearchParams
from tests.integration.beams import assert_same, searched, searched_by_transformers
from tests.integration.prompts import PROMPTS
from tests.unit.models.tiny import VOCAB_SIZE, hf_model

pytestmark = pytest.mark.timeout(900)

TINY_STOPS = [2, 5, 9, 17, 33, 40]  # so many that sequences end early and late


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, list[list[int]]]:
    reference = hf_model("llama")
    folder = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(folder)
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 16, 17, 31, 60)]
    return reference, str(folder), prompts


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"n": 2}, {}),
        ({"n": 4}, {"enable_prefix_caching": False}),
        ({"n": 3, "best_of": 7}, {}),
        ({"n": 4, "early_stopping": True}, {"num_kv_blocks": 8}),
        ({"n": 4, "early_stopping": "never"}, {"num_kv_blocks": 8, "enable_prefix_caching": False}),
        ({"n": 4, "early_stopping": "never", "length_penalty": 0.0}, {"block_size": 1}),
        ({"n": 4, "length_penalty": 2.0}, {"num_kv_blocks": 24, "block_size": 4, "async_scheduling": True}),
        ({"n": 4, "length_penalty": -1.0}, {"max_num_seqs": 4, "max_chunk_tokens": 5}),
        ({"n": 4, "min_tokens": 12}, {"async_scheduling": True, "eviction_policy": "cost"}),
    ],
    ids=str,
)
def test_a_random_model_gives_the_sequences_of_transformers(
    tiny: tuple[Any, str, list[list[int]]], asked: dict[str, Any], options: dict[str, Any]
) -> None:
    """Options of the engine change speed only."""
    reference, folder, prompts = tiny
    params = SamplingParams(use_beam_search=True, max_tokens=24, stop_token_ids=TINY_STOPS, **asked)
    llm = LLM(folder, dtype="float32", device="cpu", **options)
    theirs = [searched_by_transformers(reference, prompt, params, TINY_STOPS) for prompt in prompts]
    assert_same(searched(llm, prompts, params), theirs)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=1024)


def test_beam_search_returns_whole_sequences(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    by_text, by_ids = llm.beam_search([PROMPTS[0], llm.get_tokenizer().encode(PROMPTS[0])], params, use_tqdm=False)
    assert by_text == by_ids
    assert len(by_text.sequences) == 3
    assert "Paris" in by_text.sequences[0].text
    prompt_tokens = llm.get_tokenizer().encode(PROMPTS[0])
    for sequence in by_text.sequences:
        assert sequence.text.startswith(PROMPTS[0])
        assert sequence.tokens[: len(prompt_tokens)] == prompt_tokens
        assert len(sequence.tokens) == len(prompt_tokens) + 8
        assert sequence.finish_reason == "length"
    logprobs = [sequence.cum_logprob for sequence in by_text.sequences]
    assert logprobs == sorted(logprobs, reverse=True)
    with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
        llm.beam_search(PROMPTS[0], SamplingParams())  # type: ignore[arg-type]


def test_a_stop_token_is_in_the_tokens_and_not_in_the_text(llm: LLM) -> None:
    prompt = llm.chat_prompt([{"role": "user", "content": "Say hello in one short sentence."}])
    params = SamplingParams(use_beam_search=True, n=1, best_of=3, max_tokens=40)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (best,) = output.outputs
    assert (best.finish_reason, best.stop_reason) == ("stop", None)
    assert best.token_ids[-1] in llm.get_tokenizer().eos_token_ids
    assert best.text and "<|im_end|>" not in best.text
    with pytest.raises(InvalidRequestError, match="streaming"):
        llm.stream(prompt, params)
