"""Greedy generation under different engine settings, and the check against transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from headway import LLM, RequestOutput, SamplingParams

# Everything here changes speed only; the tokens must stay the same.
VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "few at a time": {"max_num_seqs": 3},
    "chunks of 1": {"max_chunk_tokens": 1},
    "chunks of 7": {"max_chunk_tokens": 7},
    "chunks of 64": {"max_chunk_tokens": 64},
    "blocks of 1": {"block_size": 1},
    "blocks of 128": {"block_size": 128},
    "priority": {"scheduling_policy": "priority"},
    "overlap": {"async_scheduling": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "swapped to the host": {
        "num_kv_blocks": 13,
        "host_cache_memory": 2**25,
        "preemption_mode": "swap",
        "max_chunk_tokens": 20,
        "async_scheduling": True,
    },
    "overlap in a cache that is too small": {"async_scheduling": True, "num_kv_blocks": 13, "max_chunk_tokens": 20},
}


@dataclass(frozen=True)
class Run:
    """Greedy tokens of each prompt, and how often a request had to give way."""

    tokens: list[list[int]]
    num_preemptions: int
    logprobs: list[list[float]]
    """Of each token, where they were asked for."""


def run(llm: LLM, prompts: Sequence[str] | Sequence[list[int]], num_tokens: int, *, with_logprobs: bool = False) -> Run:
    """All prompts in one batch; invariants are checked after every step."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0 if with_logprobs else None
    )
    done: dict[str, RequestOutput] = {}
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(f"p{index}", prompt, params, stream=False)
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step().outputs}
        llm.engine.check_invariants()
    assert llm.engine.core.scheduler.kv_cache.num_used_blocks == 0
    outputs = [done[f"p{index}"] for index in range(len(prompts))]
    return Run(
        tokens=[output.outputs[0].token_ids for output in outputs],
        num_preemptions=sum(output.metrics.num_preemptions for output in outputs if output.metrics),
        logprobs=[_logprobs(output) for output in outputs],
    )


def _logprobs(output: RequestOutput) -> list[float]:
    completion = output.outputs[0]
    if completion.logprobs is None:
        return []
    return [position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs, strict=True)]


def generate(
    model: str, prompts: Sequence[str] | Sequence[list[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """The greedy tokens of each prompt on a new engine: exact mode on the CPU unless the options say otherwise."""
    return run(LLM(model, **{"dtype": "float32", "device": "cpu"} | options), prompts, num_tokens).tokens


def in_transformers(path: Path) -> Any:
    """A GGUF file's model in transformers, which would read the file twice, and all names once for each module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()


def greedy_mismatch(reference: Any, prompt: list[int], tokens: list[int]) -> str | None:
    """None if `reference` (a transformers model) would greedily continue the prompt with exactly these tokens.

    One pass over prompt and continuation shows the reference's choice after every prefix; if each is the next token,
    generating with it token by token would give the same continuation.
    """
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1).logits[0, :-1]
    chosen = logits.argmax(dim=-1).tolist()
    if chosen == tokens:
        return None
    place = next(i for i, (a, b) in enumerate(zip(chosen, tokens, strict=True)) if a != b)
    gap = float(logits[place, chosen[place]] - logits[place, tokens[place]])
    return f"token {place}: reference {chosen[place]}, ours {tokens[place]}, logits differ by {gap:.2e}"
