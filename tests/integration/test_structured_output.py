"""Structured output with a real model: the tokens of a plain loop, whatever only changes speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway import LLM, RequestOutput, SamplingParams
from headway.sampling_params import StructuredOutputsParams
from headway.structured.grammars import grammar_of
from tests.integration.greedy import VARIANTS, in_transformers
from tests.integration.prompts import PROMPTS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS = (
    StructuredOutputsParams(json=PERSON),
    StructuredOutputsParams(choice=["certainly", "certainly not", "perhaps"]),
    StructuredOutputsParams(regex=r"[A-Z][a-z]{2,12}( [a-z]{2,12}){1,8}\."),
    StructuredOutputsParams(grammar='root ::= item+ "."\nitem ::= "- " [a-z ]+ "\\n"'),
    StructuredOutputsParams(json_object=True),
)
NUM_TOKENS = 24
NUM_PROMPTS = 8
"""The reference computes the whole sequence for each token."""
PLAIN_EVERY = 3
"""Every third request of a batch has no grammar."""
COMPARED = ("chunks of 7", "swapped to the host", "overlap in a cache that is too small")

pytestmark = pytest.mark.timeout(900)


def params_of(index: int, **fields: Any) -> SamplingParams:
    structured = None if index % PLAIN_EVERY == PLAIN_EVERY - 1 else KINDS[index % len(KINDS)]
    return SamplingParams(max_tokens=NUM_TOKENS, structured_outputs=structured, **fields)


def answers(llm: LLM, all_params: list[SamplingParams]) -> list[RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for index, params in enumerate(all_params):
        llm.engine.add_request(f"p{index}", PROMPTS[index], params, stream=False)
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step().outputs}
        llm.engine.check_invariants()
    assert not llm.engine.guides.live, "a request has left its guide"
    return [done[f"p{index}"] for index in range(len(all_params))]


@pytest.fixture(scope="module")
def llm(cut: str) -> LLM:
    return LLM(cut, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def reference(cut: str) -> Any:
    return in_transformers(Path(cut))


@torch.inference_mode()
def plain_loop(reference: Any, llm: LLM, prompt: str, structured: StructuredOutputsParams) -> list[int]:
    """Greedy, with nothing but a model's logits and a matcher's mask."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    params = SamplingParams(structured_outputs=structured).with_grammar(grammar_of(structured))
    matcher = llm.engine.guides.compile(params).result().starts[0].deep_copy()
    tokens, found, cache = torch.tensor([tokenizer.encode(prompt)]), [], None
    for _ in range(NUM_TOKENS):
        result = reference(tokens, past_key_values=cache, use_cache=True)
        cache, logits = result.past_key_values, result.logits[0, -1].numpy()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        token = int(np.where(allowed, logits, -np.inf).argmax())
        found.append(token)
        if token in tokenizer.eos_token_ids:
            break
        assert matcher.consume_token(token)
        tokens = torch.tensor([[token]])
    return found


def test_greedy_tokens_are_those_of_a_plain_loop(llm: LLM, reference: Any) -> None:
    all_params = [params_of(index, temperature=0.0) for index in range(NUM_PROMPTS)]
    for index, output in enumerate(answers(llm, all_params)):
        structured = all_params[index].structured_outputs
        if structured is not None:
            assert output.outputs[0].token_ids == plain_loop(reference, llm, PROMPTS[index], structured), index


def sampled_params() -> list[SamplingParams]:
    """Greedy, drawn, penalised; some with logprobs, stop strings, several completions."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.9, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 1.1, "seed": 9, "n": 2},
        {"temperature": 0.7, "seed": 10, "min_tokens": 12, "stop": ["\n\n"]},
    ]
    return [params_of(index, **extras[index % len(extras)]) for index in range(8)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def batched(llm: LLM) -> list[list[list[int]]]:
    return tokens_of(answers(llm, sampled_params()))


@pytest.mark.parametrize("name", COMPARED)
def test_what_only_changes_speed_changes_no_token(name: str, cut: str, batched: list[list[list[int]]]) -> None:
    other = LLM(cut, dtype="float32", device="cpu", **VARIANTS[name])
    assert tokens_of(answers(other, sampled_params())) == batched


def test_answers_that_end_by_themselves_fit(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=200, n=8, structured_outputs=StructuredOutputsParams(json=PERSON)
    )
    (output,) = llm.generate("A person, as JSON: ", params)
    ended = [completion for completion in output.outputs if completion.finish_reason == "stop"]
    assert len(ended) >= 6
    for completion in ended:
        person = json.loads(completion.text)
        assert set(person) == {"name", "age", "tags"} and 0 <= person["age"] <= 120 and len(person["tags"]) <= 3


def test_allowed_tokens_alone_and_with_a_grammar(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    digits = [tokenizer.encode(digit)[0] for digit in "0123456789"]
    (output,) = llm.generate("7 + 5 = ", SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=digits))
    assert set(output.outputs[0].token_ids) <= set(digits)
    both = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        allowed_token_ids=digits[3:5],
        structured_outputs=StructuredOutputsParams(regex="[0-9]{6}"),
        ignore_eos=True,
    )
    (output,) = llm.generate("7 + 5 = ", both)
    assert set(output.outputs[0].text) <= {"3", "4"} and len(output.outputs[0].text) == 6
