"""Greedy float32 tokens equal those of transformers, and do not depend on anything that only changes speed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from tests.integration.beams import assert_same, searched, searched_by_transformers
from tests.integration.greedy import VARIANTS, Run, generate, greedy_mismatch, in_transformers, run
from tests.integration.prompts import PROMPTS
from tests.unit.models.tiny import VOCAB_SIZE, hf_model

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
NUM_TOKENS = 48
NUM_EMBEDDED_TOKENS = 24
NUM_COMPARED_TOKENS = 8
"""In chunks: the logarithms of their probabilities are the same to the bit, so a few show what many would."""
COMPARED_PROMPTS = PROMPTS[3::6]
"""In chunks: a sixth, with the longest one. All of them are compared with transformers, in one batch."""
VARIANTS_OF_EVERY_FAMILY = ("chunks of 7", "blocks of 1", "blocks of 128", "swapped to the host")
"""What reaches the model in another shape. The others differ in when a request runs, which one family shows."""
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def embedded() -> str:
    return str(embedded_model_path())


@pytest.fixture(scope="module")
def reference(embedded: str) -> Any:
    return in_transformers(Path(embedded))


@pytest.fixture(scope="module")
def batched(embedded: str) -> Run:
    """What the embedded model says to all prompts in one batch, and what each token is worth."""
    return run(LLM(embedded, dtype="float32", device="cpu"), PROMPTS, NUM_EMBEDDED_TOKENS, with_logprobs=True)


def test_embedded_model_batched(embedded: str, batched: Run, reference: Any) -> None:
    tokenizer = open_checkpoint(embedded).tokenizer()
    assert tokenizer is not None
    assert len(PROMPTS) >= 32
    wrong = {
        prompt[:40]: mismatch
        for prompt, tokens in zip(PROMPTS, batched.tokens, strict=True)
        if (mismatch := greedy_mismatch(reference, tokenizer.encode(prompt), tokens))
    }
    assert not wrong


def test_embedded_model_in_chunks(embedded: str, batched: Run) -> None:
    llm = LLM(embedded, dtype="float32", device="cpu", max_chunk_tokens=7, block_size=1)
    found = run(llm, COMPARED_PROMPTS, NUM_COMPARED_TOKENS, with_logprobs=True)
    assert found.tokens == [tokens[:NUM_COMPARED_TOKENS] for tokens in batched.tokens[3::6]]
    assert found.logprobs == [logprobs[:NUM_COMPARED_TOKENS] for logprobs in batched.logprobs[3::6]]


def test_embedded_model_beam_search(reference: Any) -> None:
    llm = LLM(dtype="float32", device="cpu")
    prompts = [llm.chat_prompt([{"role": "user", "content": "Say hello in one short sentence."}])]
    params = SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=16)
    eos = list(llm.get_tokenizer().eos_token_ids)
    theirs = [searched_by_transformers(reference, prompt, params, eos) for prompt in prompts]
    assert any(tokens[-1] in eos for sequences in theirs for tokens, _ in sequences)
    assert_same(searched(llm, prompts, params), theirs)


@dataclass(frozen=True)
class Tiny:
    """A random model, its folder, prompts, and what the model says to all of them in one batch."""

    family: str
    reference: Any
    folder: str
    prompts: list[list[int]]
    batched: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random model of each family, and random prompts of 1 to 90 tokens."""
    family: str = request.param
    reference = hf_model(family)
    folder = tmp_path_factory.mktemp(family)
    reference.save_pretrained(folder)
    rng = random.Random(family)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 17, 40, 90]))] for _ in range(12)]
    return Tiny(family, reference, str(folder), prompts, generate(str(folder), prompts, NUM_TOKENS))


def test_random_models_in_all_variants(tiny: Tiny) -> None:
    folder, prompts, batched = tiny.folder, tiny.prompts, tiny.batched
    mismatches = [greedy_mismatch(tiny.reference, p, t) for p, t in zip(prompts, batched, strict=True)]
    assert mismatches == [None] * len(prompts)
    for name in VARIANTS if tiny.family == FAMILIES[0] else VARIANTS_OF_EVERY_FAMILY:
        assert generate(folder, prompts, NUM_TOKENS, **VARIANTS[name]) == batched, name
    for backend in ("torch_padded", "torch_reference"):
        assert generate(folder, prompts, NUM_TOKENS, attention_backend=backend) == batched, backend
    llm = LLM(folder, dtype="float32", device="cpu")
    assert [run(llm, [prompt], NUM_TOKENS).tokens[0] for prompt in prompts] == batched


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_models_with_a_cache_that_is_too_small(tiny: Tiny, block_size: int) -> None:
    llm = LLM(tiny.folder, dtype="float32", device="cpu", block_size=block_size, num_kv_blocks=-(-200 // block_size))
    result = run(llm, tiny.prompts, NUM_TOKENS)
    assert result.tokens == tiny.batched
    assert result.num_preemptions >= 3


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_transformers(reference: Any, embedded: str, pooling: str) -> None:
    """Also in chunks, and with too little memory for all prompts at once."""
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_kv_blocks": 64, "preemption_mode": "recompute"}
    prompts = PROMPTS[:8]
    for options in ({}, small):
        llm = LLM(embedded, dtype="float32", device="cpu", **options)
        for output in llm.embed(prompts, pooling=pooling, normalize=False):
            with torch.no_grad():
                hidden = reference.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            expected = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=1e-3, atol=1e-3)
        llm.shutdown()
