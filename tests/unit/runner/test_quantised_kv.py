"""Engines with a quantised KV cache: tokens do not depend on what only changes speed, and differ little from exact."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.triton_device import ON_GPU, choose  # isort: split

from headway import LLM, SamplingParams
from headway.errors import ConfigError
from tests.integration.greedy import run
from tests.unit.runner.tiny_llm import TinyLLM, random_prompts

QUANTISED = ["fp8", "int8", "int4"]
PROMPTS = random_prompts(3, 1, 9, 20, 2, 14)
NUM_TOKENS = 12

# Everything here changes speed only; the tokens must stay the same.
VARIANTS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "chunks of 1": {"max_chunk_tokens": 1},
    "chunks of 5": {"max_chunk_tokens": 5},
    "blocks of 1": {"block_size": 1},
    "blocks of 64": {"block_size": 64},
    "overlap": {"async_scheduling": True},
    "a cache that is too small": {"block_size": 4, "num_kv_blocks": 12, "max_chunk_tokens": 3},
    "torch_padded": {"attention_backend": "torch_padded"},
    "torch_reference": {"attention_backend": "torch_reference"},
}


@pytest.mark.parametrize("kv_cache_dtype", QUANTISED)
def test_tokens_do_not_depend_on_batching_chunks_or_blocks(tiny: TinyLLM, kv_cache_dtype: str) -> None:
    expected = run(tiny.on_cpu(kv_cache_dtype=kv_cache_dtype), PROMPTS, NUM_TOKENS).tokens
    for name, options in VARIANTS.items():
        found = run(tiny.on_cpu(kv_cache_dtype=kv_cache_dtype, **options), PROMPTS, NUM_TOKENS)
        assert found.tokens == expected, name
        assert bool(found.num_preemptions) == ("num_kv_blocks" in options), name


@pytest.mark.parametrize(
    ("kv_cache_dtype", "in_chunks"),
    choose(itertools.product(QUANTISED, [False, True]), ("fp8", False), ("int8", True), ("int4", True)),
)
def test_the_gpu_runner_gives_the_tokens_of_the_cpu(tiny: TinyLLM, kv_cache_dtype: str, in_chunks: bool) -> None:
    prompts = PROMPTS[:3]
    options = {"max_chunk_tokens": 5, "block_size": 4, "async_scheduling": True} if in_chunks else {}
    expected = run(tiny.on_cpu(kv_cache_dtype=kv_cache_dtype), prompts, 3).tokens
    assert run(tiny.on_gpu(kv_cache_dtype=kv_cache_dtype, **options), prompts, 3).tokens == expected


def logprobs(llm: LLM) -> torch.Tensor:
    """Of every token of every prompt but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return torch.tensor(
        [
            position[token].logprob
            for output in outputs
            for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
        ]
    )


@pytest.mark.parametrize(("kv_cache_dtype", "limit"), [("float16", 0.01), ("int8", 0.1), ("fp8", 0.5), ("int4", 0.8)])
def test_logits_change_little(tiny: TinyLLM, kv_cache_dtype: str, limit: float) -> None:
    change = (logprobs(tiny.on_cpu(kv_cache_dtype=kv_cache_dtype)) - logprobs(tiny.on_cpu())).abs()
    assert 0.0 < float(change.mean()) < limit / 4
    assert float(change.max()) < limit


def test_the_cache_holds_more_tokens_in_the_same_memory(tiny: TinyLLM) -> None:
    """2 layers x 2 heads x 2 x 16 numbers."""
    sizes = {
        name: tiny.on_cpu(kv_cache_dtype=name, kv_cache_memory=2**16).engine.plan
        for name in ("auto", "float16", *QUANTISED)
    }
    per_token = {name: plan.bytes_per_block / plan.block_size for name, plan in sizes.items()}
    assert per_token == {"auto": 512, "float16": 256, "fp8": 144, "int8": 144, "int4": 112}
    assert sizes["int8"].num_tokens > 1.7 * sizes["float16"].num_tokens
    assert "(int8)" in str(sizes["int8"])


def test_what_the_kernels_cannot_do_is_refused(tiny: TinyLLM) -> None:
    with pytest.raises(ConfigError, match="'bfloat16' is not for the CPU kernels; use float32, float16"):
        tiny.on_cpu(kv_cache_dtype="bf16")
    with pytest.raises(ConfigError, match="'float16' does not go with the Triton kernels and a model in float32"):
        tiny.on_gpu(kv_cache_dtype="float16")
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of"):
        tiny.on_cpu(kv_cache_dtype="int3")


@pytest.mark.skipif(ON_GPU, reason="the engine would run on the GPU")
def test_bfloat16_caches_on_torch_kernels(tiny: TinyLLM) -> None:
    """A model in bfloat16 has no CPU kernels of its own, so that torch takes any format."""
    llm = tiny._make(device="cpu", dtype="bfloat16", quantization="none", kv_cache_dtype="bf16")
    assert llm.engine.plan.kv_dtype == "bfloat16"
    assert all(len(tokens) == 3 for tokens in run(llm, PROMPTS[:2], 3).tokens)
