"""Beam search with real models: the sequences of transformers, and memory and steps that forks are meant to save."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway import LLM, InvalidRequestError, SamplingParams
from headway.sampling_params import BeamSearchParams
from tests.integration.beams import Sequences, assert_same, searched, searched_by_transformers
from tests.integration.prompts import PASSAGE, PROMPTS
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
    "options",
    [
        {"n": 2},
        {"n": 4},
        {"n": 3, "best_of": 7},
        {"n": 4, "early_stopping": True},
        {"n": 4, "early_stopping": "never"},
        {"n": 4, "early_stopping": "never", "length_penalty": 0.0},
        {"n": 4, "length_penalty": 2.0},
        {"n": 4, "length_penalty": -1.0},
        {"n": 4, "min_tokens": 12},
    ],
    ids=str,
)
def test_a_random_model_gives_the_sequences_of_transformers(
    tiny: tuple[Any, str, list[list[int]]], options: dict[str, Any]
) -> None:
    reference, folder, prompts = tiny
    params = SamplingParams(use_beam_search=True, max_tokens=24, stop_token_ids=TINY_STOPS, **options)
    llm = LLM(folder, dtype="float32", device="cpu")
    theirs = [searched_by_transformers(reference, prompt, params, TINY_STOPS) for prompt in prompts]
    assert_same(searched(llm, prompts, params), theirs)


FOUR_BEAMS = SamplingParams(use_beam_search=True, n=4, max_tokens=24, stop_token_ids=TINY_STOPS)


@pytest.fixture(scope="module")
def four_beams(tiny: tuple[Any, str, list[list[int]]]) -> list[Sequences]:
    _, folder, prompts = tiny
    return searched(LLM(folder, dtype="float32", device="cpu"), prompts, FOUR_BEAMS)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 8},
        {"num_kv_blocks": 8, "enable_prefix_caching": False},
        {"num_kv_blocks": 24, "block_size": 4, "async_scheduling": True},
        {"block_size": 1},
        {"max_num_seqs": 3, "max_chunk_tokens": 5},
        {"async_scheduling": True, "eviction_policy": "cost"},
    ],
    ids=str,
)
def test_what_changes_speed_does_not_change_sequences(
    tiny: tuple[Any, str, list[list[int]]], four_beams: list[Sequences], options: dict[str, Any]
) -> None:
    _, folder, prompts = tiny
    assert_same(searched(LLM(folder, dtype="float32", device="cpu", **options), prompts, FOUR_BEAMS), four_beams)


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


def test_best_of_is_the_most_likely_of_the_same_completions(llm: LLM) -> None:
    every, best = (
        llm.generate(PROMPTS[4], SamplingParams(seed=3, max_tokens=12, logprobs=0, **options), use_tqdm=False)[0]
        for options in ({"n": 5}, {"n": 2, "best_of": 5})
    )
    ranked = sorted(every.outputs, key=lambda each: -(each.cumulative_logprob or 0.0) / len(each.token_ids))
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in ranked[:2]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=8, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(n=8, use_beam_search=True, max_tokens=20, ignore_eos=True),
    ],
    ids=["samples", "beams"],
)
def test_eight_on_a_long_prompt_need_few_more_blocks_than_one(llm: LLM, params: SamplingParams) -> None:
    prompt = llm.get_tokenizer().encode(f"{'Beams' if params.use_beam_search else 'Samples'}: {PASSAGE} {PASSAGE}")
    one = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    num_together, num_alone = peak_blocks(llm, prompt, params), peak_blocks(llm, prompt, one)
    num_output_blocks = -(-20 // 16)
    assert num_alone >= len(prompt) // 16
    assert num_together <= num_alone + 8 * (num_output_blocks + 1)


def peak_blocks(llm: LLM, prompt: list[int], params: SamplingParams) -> int:
    """Most blocks that requests held in a step; with invariants after every step."""
    engine = llm.engine
    engine.add_request("a", prompt, params, stream=False)
    peak = 0
    while engine.has_unfinished_requests():
        peak = max(peak, engine.step().report.num_used_blocks)
        engine.check_invariants()
    assert engine.core.scheduler.kv_cache.num_used_blocks == 0
    return peak


def test_beams_of_a_position_share_a_step_and_compute_one_token_each(llm: LLM) -> None:
    prompt = llm.get_tokenizer().encode(PASSAGE)
    llm.engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=1))
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=18, ignore_eos=True)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    llm.engine.add_request("b", prompt, params, stream=False)
    shares = []
    while llm.engine.has_unfinished_requests():
        shares.append([row.num_tokens for row in llm.engine.step().report.rows])
    assert shares == [[1]] + [[1] * 4] * 17
