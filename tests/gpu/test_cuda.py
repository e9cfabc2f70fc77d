"""The same engine on a CUDA device: the CPU's tokens in float32, sane ones in bfloat16."""

from __future__ import annotations

import pytest
import torch

from headway import LLM
from headway.loader.embedded import embedded_model_path
from tests.integration.greedy import generate, run
from tests.integration.prompts import PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def model() -> str:
    return str(embedded_model_path())


@pytest.fixture(scope="module")
def cpu_tokens(model: str) -> list[list[int]]:
    return generate(model, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("backend", ["torch_padded", "torch_reference"])
def test_float32_tokens_equal_the_cpus(model: str, cpu_tokens: list[list[int]], backend: str) -> None:
    assert generate(model, PROMPTS, NUM_TOKENS, device="cuda", attention_backend=backend) == cpu_tokens


def test_float32_tokens_equal_the_cpus_with_a_cache_that_is_too_small(model: str, cpu_tokens: list[list[int]]) -> None:
    llm = LLM(model, dtype="float32", device="cuda", num_kv_blocks=40, max_num_seqs=16, max_chunk_tokens=64)
    result = run(llm, PROMPTS, NUM_TOKENS)
    assert result.tokens == cpu_tokens
    assert result.num_preemptions >= 10


def test_bfloat16_tokens_mostly_agree_with_float32(model: str, cpu_tokens: list[list[int]]) -> None:
    tokens = generate(model, PROMPTS, NUM_TOKENS, device="cuda", dtype="bfloat16")
    first_agree = sum(ours[0] == cpu[0] for ours, cpu in zip(tokens, cpu_tokens, strict=True))
    assert first_agree >= 0.85 * len(PROMPTS)
    assert all(len(ours) == NUM_TOKENS for ours in tokens)
