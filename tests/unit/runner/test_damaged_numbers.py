"""Activations that are no numbers end their request with an error, in every number format, and no other request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.triton_device import ON_GPU  # isort: split

from headway import LLM, SamplingParams
from headway.layers.native_ops import NativeOps
from headway.layers.ops import TorchOps
from headway.outputs import CompletionOutput
from tests.unit.runner.tiny_llm import TinyLLM, finish_all, random_prompts

POISON = 7
PROMPTS = [[token for token in prompt if token != POISON] for prompt in random_prompts(3, 9, 4)]
BROKEN = [5, POISON, 6, 11]


def answers(llm: LLM, prompts: list[list[int]]) -> tuple[dict[str, CompletionOutput], dict[str, str]]:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for place, prompt in enumerate(prompts):
        llm.engine.add_request(str(place), prompt, params, stream=False)
    return finish_all(llm)


@pytest.mark.skipif(ON_GPU, reason="the engine would run on the GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "fp8", "int8", "int4"])
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "float32"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_whose_state_is_no_number_ends_its_request(
    tiny: TinyLLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], kv_cache_dtype: str, value: float
) -> None:
    """It stands in the middle of the prompt: those behind it only know it by its keys and values."""

    def damaged(embedding: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def lookup(self: Any, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            states = embedding(self, token_ids, table)
            states[token_ids == POISON, 3] = value
            return states

        return lookup

    llm = tiny._make(device="cpu", kv_cache_dtype=kv_cache_dtype, **options)
    expected = [done.token_ids for done in answers(llm, PROMPTS)[0].values()]
    for ops in (NativeOps, TorchOps):
        monkeypatch.setattr(ops, "embedding", damaged(ops.embedding))
    done, errors = answers(llm, [*PROMPTS, BROKEN])
    assert done["3"].finish_reason == "error" and not done["3"].token_ids
    assert "the model gave a logit of" in errors["3"]
    assert [done[str(place)].token_ids for place in range(len(PROMPTS))] == expected
