"""Greedy float32 tokens equal those of transformers, and do not depend on anything that only changes speed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headway import LLM
from headway.loader.embedded import embedded_model_path
from tests.integration.greedy import VARIANTS, generate, greedy_mismatch, run
from tests.integration.prompts import PROMPTS
from tests.unit.models.tiny import VOCAB_SIZE, hf_model

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
NUM_TOKENS = 64
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def embedded() -> str:
    return str(embedded_model_path())


@pytest.fixture(scope="module")
def embedded_tokens(embedded: str) -> list[list[int]]:
    """What the embedded model says to each prompt, all in one batch."""
    return generate(embedded, PROMPTS, NUM_TOKENS)


def test_embedded_model_batched(embedded: str, embedded_tokens: list[list[int]]) -> None:
    path = Path(embedded)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokenizer = LLM(embedded, max_model_len=64, num_kv_blocks=8).get_tokenizer()
    assert len(PROMPTS) >= 32
    wrong = {
        prompt[:40]: mismatch
        for prompt, tokens in zip(PROMPTS, embedded_tokens, strict=True)
        if (mismatch := greedy_mismatch(reference, tokenizer.encode(prompt), tokens))
    }
    assert not wrong


@pytest.mark.parametrize(
    "options",
    [
        {"max_chunk_tokens": 1, "block_size": 128},
        {"max_chunk_tokens": 7, "block_size": 1},
        {"max_chunk_tokens": 64, "max_num_seqs": 5, "scheduling_policy": "priority"},
    ],
    ids=str,
)
def test_embedded_model_variants(embedded: str, embedded_tokens: list[list[int]], options: dict[str, Any]) -> None:
    assert generate(embedded, PROMPTS, NUM_TOKENS, **options) == embedded_tokens


def test_embedded_model_alone(embedded: str, embedded_tokens: list[list[int]]) -> None:
    llm = LLM(embedded, dtype="float32", device="cpu")
    assert [run(llm, [prompt], NUM_TOKENS).tokens[0] for prompt in PROMPTS] == embedded_tokens


def test_embedded_model_with_a_cache_that_is_too_small(embedded: str, embedded_tokens: list[list[int]]) -> None:
    llm = LLM(embedded, dtype="float32", device="cpu", num_kv_blocks=40, max_num_seqs=16)
    result = run(llm, PROMPTS, NUM_TOKENS)
    assert result.tokens == embedded_tokens
    assert result.num_preemptions >= 10


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, list[list[int]]]:
    """A random model of each family, its folder, and random prompts of 1 to 90 tokens."""
    family: str = request.param
    reference = hf_model(family)
    folder = tmp_path_factory.mktemp(family)
    reference.save_pretrained(folder)
    rng = random.Random(family)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 17, 40, 90]))] for _ in range(12)]
    return reference, str(folder), prompts


def test_random_models_in_all_variants(tiny: tuple[Any, str, list[list[int]]]) -> None:
    reference, folder, prompts = tiny
    batched = generate(folder, prompts, NUM_TOKENS)
    assert [greedy_mismatch(reference, p, t) for p, t in zip(prompts, batched, strict=True)] == [None] * len(prompts)
    for name, options in VARIANTS.items():
        assert generate(folder, prompts, NUM_TOKENS, **options) == batched, name
    for backend in ("torch_padded", "torch_reference"):
        assert generate(folder, prompts, NUM_TOKENS, attention_backend=backend) == batched, backend
    llm = LLM(folder, dtype="float32", device="cpu")
    assert [run(llm, [prompt], NUM_TOKENS).tokens[0] for prompt in prompts] == batched


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_models_with_a_cache_that_is_too_small(tiny: tuple[Any, str, list[list[int]]], block_size: int) -> None:
    _, folder, prompts = tiny
    expected = generate(folder, prompts, NUM_TOKENS)
    llm = LLM(folder, dtype="float32", device="cpu", block_size=block_size, num_kv_blocks=-(-200 // block_size))
    result = run(llm, prompts, NUM_TOKENS)
    assert result.tokens == expected
    assert result.num_preemptions >= 3
