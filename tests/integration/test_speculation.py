"""Guesses change no token: greedy and sampled, with everything that a request can ask for, in every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.loader.embedded import embedded_model_path
from headway.sampling_params import StructuredOutputsParams

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n"
PROMPTS = [
    f"Copy this code twice:\n{CODE}\nFirst copy:\n{CODE}\nSecond copy:\n",
    "red green blue red green blue red green blue red",
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. Again: 1, 2, 3, 4,",
    f"{CODE}\n\nThe same with another name:\n\ndef plus(a, b):\n",
    "Once upon a time there was a cat. The cat was black. The cat was",
]
FORM = {
    "type": "object",
    "properties": {
        "name_of_the_function": {"enum": ["the_first_function", "the_second_function"]},
        "number_of_arguments": {"type": "integer"},
        "what_it_returns": {"type": "string", "maxLength": 30},
    },
    "required": ["name_of_the_function", "number_of_arguments", "what_it_returns"],
    "additionalProperties": False,
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "n": 4},
    {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.15, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    {"temperature": 0.0, "stop": [" 8", "6,"], "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.05, "bad_words": ["return"], "min_tokens": 30},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "logit_bias": {"198": -2.0}, "prompt_logprobs": 1},
    {"temperature": 0.3, "structured_outputs": StructuredOutputsParams(regex="(cat|dog)( and (cat|dog)){12}")},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(json=FORM), "logprobs": 1},
    {"temperature": 1.0, "seed": 3, "structured_outputs": StructuredOutputsParams(json=FORM), "presence_penalty": 0.2},
    {"temperature": 0.7, "seed": 2, "allowed_token_ids": list(range(200, 900)), "ignore_eos": True},
    {"temperature": 0.7, "seed": 2, "allowed_token_ids": list(range(900))},
]
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "a cache that is too small": {"num_kv_blocks": 40, "block_size": 16, "max_model_len": 320},
    "blocks of 1, no prefix cache": {"block_size": 1, "enable_prefix_caching": False},
    "static": {"batching": "static"},
    "a draft model": {"speculation": "draft"},
}
CASES = [(prompt, params) for number, params in enumerate(PARAMS) for prompt in (PROMPTS[number % 6], PROMPTS[0])]


def answers(llm: LLM) -> list[Any]:
    """All that a request can be told, and the same again, when prefixes are cached."""
    prompts = [prompt for prompt, _ in CASES]
    params = [SamplingParams(max_tokens=36, **options) for _, options in CASES]
    found = []
    for _ in range(2):
        for output in llm.generate(prompts, params):
            for each in output.outputs:
                chosen = each.logprobs and [
                    (token, round(found.logprob, 3)) for place in each.logprobs for token, found in place.items()
                ]
                found.append((tuple(each.token_ids), each.text, each.finish_reason, each.stop_reason, chosen))
    return found


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    llm = LLM(dtype="float32", speculation="off")
    try:
        return answers(llm)
    finally:
        llm.shutdown()


@pytest.fixture(params=VARIANTS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {"speculation": "ngram", **VARIANTS[request.param]}
    if options["speculation"] == "draft":
        options["draft_model"] = str(embedded_model_path())
    llm = LLM(dtype="float32", **options)
    yield llm
    llm.shutdown()


def test_the_same_tokens_as_without(llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = llm.engine.core.scheduler.speculation
    assert speculation is not None
    # Whatever it costs: as many as possible.
    monkeypatch.setattr(
        speculation, "_num_worth", lambda levels, *, most, **_: min(sum(x.num_guesses for x in levels), most)
    )
    found = answers(llm)
    assert found == expected
    assert speculation.stats.num_accepted_tokens > 100
    if llm.engine.config.scheduler.speculation == "ngram":
        assert speculation.stats.num_draft_tokens - speculation.stats.num_accepted_tokens > 50
    llm.engine.check_invariants()
