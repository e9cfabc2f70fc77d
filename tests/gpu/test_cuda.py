"""The same engine on a CUDA device: the CPU's tokens in float32, logits of the expected error in bfloat16."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from headway.loader.embedded import embedded_model_path
from tests.integration.every_kind import answers
from tests.integration.greedy import generate, run
from tests.integration.prompts import PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NUM_TOKENS = 64

# Everything here changes speed only; the tokens must stay the same.
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs and overlap": {},
    "no graphs": {"enforce_eager": True},
    "no overlap": {"async_scheduling": False},
    "neither": {"enforce_eager": True, "async_scheduling": False},
    "blocks of 16": {"block_size": 16},
    "blocks of 1": {"block_size": 1},
    "blocks of 128": {"block_size": 128},
    "chunks of 7": {"max_chunk_tokens": 7},
    "chunks of 1": {"max_chunk_tokens": 1},
    "few at a time": {"max_num_seqs": 3},
    "guesses": {"speculation": "ngram"},
    "torch_padded": {"attention_backend": "torch_padded"},
    "torch_reference": {"attention_backend": "torch_reference"},
    "torch_reference without overlap": {"attention_backend": "torch_reference", "async_scheduling": False},
}


@pytest.fixture(scope="module")
def model() -> str:
    return str(embedded_model_path())


@pytest.fixture(scope="module")
def cpu_tokens(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """One worker computes them, and all others read them from a file that belongs to this run."""
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run_id is None:
        return generate(model, PROMPTS, NUM_TOKENS)
    file = tmp_path_factory.getbasetemp().parent / f"cpu_tokens_{run_id}.json"
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps(generate(model, PROMPTS, NUM_TOKENS)))
    found: list[list[int]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_tokens_equal_the_cpus(model: str, cpu_tokens: list[list[int]], variant: str) -> None:
    llm = LLM(model, dtype="float32", device="cuda", kv_cache_memory=2**30, **VARIANTS[variant])
    assert run(llm, PROMPTS, NUM_TOKENS).tokens == cpu_tokens
    # A second time: now the batch sizes have been seen, and graphs are replayed.
    assert run(llm, PROMPTS, NUM_TOKENS).tokens == cpu_tokens


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_float32_tokens_equal_the_cpus_with_a_cache_that_is_too_small(
    model: str, cpu_tokens: list[list[int]], async_scheduling: bool
) -> None:
    llm = LLM(
        model,
        dtype="float32",
        device="cuda",
        async_scheduling=async_scheduling,
        block_size=16,
        num_kv_blocks=40,
        max_num_seqs=16,
        max_chunk_tokens=64,
    )
    for _ in range(2):
        result = run(llm, PROMPTS, NUM_TOKENS)
        assert result.tokens == cpu_tokens
        assert result.num_preemptions >= 10


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"num_kv_blocks": 60, "block_size": 16}])
def test_guesses_change_no_token(model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, n = 4, penalties, stop strings, a grammar: as many guesses as there are."""
    memory = {} if "num_kv_blocks" in options else {"kv_cache_memory": 2**30}
    common = {"dtype": "float32", "device": "cuda", "max_model_len": 512, "max_num_seqs": 24, **memory, **options}
    llm = LLM(model, **common)
    expected = [found[:4] for found in answers(llm)]
    llm.shutdown()
    llm = LLM(model, speculation="ngram", **common)
    speculation = llm.engine.core.scheduler.speculation
    assert speculation is not None
    monkeypatch.setattr(
        speculation, "_num_worth", lambda levels, *, most, **_: min(sum(x.num_guesses for x in levels), most)
    )
    assert [found[:4] for found in answers(llm)] == expected
    assert speculation.stats.num_accepted_tokens > 100
    assert speculation.stats.num_draft_tokens - speculation.stats.num_accepted_tokens > 50
    llm.engine.check_invariants()
    llm.shutdown()


def test_sampled_tokens_do_not_depend_on_overlap_graphs_or_company(model: str) -> None:
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7, max_tokens=32, ignore_eos=True)

    def tokens(prompts: list[str], **options: Any) -> list[list[int]]:
        llm = LLM(model, dtype="float32", device="cuda", kv_cache_memory=2**30, **options)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    together = tokens(PROMPTS[:12])
    assert tokens(PROMPTS[:12], async_scheduling=False, enforce_eager=True) == together
    assert [tokens([prompt])[0] for prompt in PROMPTS[:3]] == together[:3]


def test_bfloat16_logprobs_have_the_error_of_the_format(model: str) -> None:
    """Against float32, the GPU's bfloat16 may be off as far as a plain bfloat16 run in torch on the CPU is."""
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 40][:8]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(**options: Any) -> torch.Tensor:
        outputs = LLM(model, max_model_len=1024, kv_cache_memory=2**28, **options).generate(
            prompts, params, use_tqdm=False
        )
        found = [
            next(iter(position.values())).logprob
            for output in outputs
            for position in output.prompt_logprobs or []
            if position is not None
        ]
        return torch.tensor(found)

    exact = logprobs(device="cpu", dtype="float32")
    plain_error = (logprobs(device="cpu", dtype="bfloat16") - exact).abs().mean()
    error = (logprobs(device="cuda", dtype="bfloat16") - exact).abs().mean()
    print(f"mean error of a logprob: {error:.4f}; plain bfloat16: {plain_error:.4f}")
    assert error <= 1.25 * plain_error
    assert (logprobs(device="cuda", dtype="float32") - exact).abs().max() < 2e-3
