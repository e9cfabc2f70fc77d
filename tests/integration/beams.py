"""Beam search of transformers and of an engine, and when both have found the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway import LLM, RequestOutput, SamplingParams

Sequences = list[tuple[list[int], float]]
"""Output tokens and score, the best first."""


def searched_by_transformers(model: Any, prompt: list[int], params: SamplingParams, eos: list[int]) -> Sequences:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=params.num_choices,
            num_return_sequences=params.n,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=eos,
            pad_token_id=eos[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = [_until_first(tokens[len(prompt) :], eos) for tokens in found.sequences.tolist()]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def _until_first(tokens: list[int], eos: list[int]) -> list[int]:
    """What follows is padding."""
    end = next((place for place, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return tokens[: end + 1]


def searched(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Sequences]:
    """All prompts at once; invariants are checked after every step."""
    done: dict[str, RequestOutput] = {}
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, params, stream=False)
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step().outputs}
        llm.engine.check_invariants()
    assert llm.engine.core.scheduler.kv_cache.num_used_blocks == 0
    return [
        [
            (each.token_ids, each.cumulative_logprob / len(each.token_ids) ** params.length_penalty)
            for each in done[str(index)].outputs
            if each.cumulative_logprob is not None
        ]
        for index in range(len(prompts))
    ]


def assert_same(ours: list[Sequences], theirs: list[Sequences]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert [tokens for tokens, _ in own] == [tokens for tokens, _ in other]
        assert [score for _, score in own] == pytest.approx([score for _, score in other], rel=1e-4, abs=1e-4)
