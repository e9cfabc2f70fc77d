"""Requests that ask for everything that can be asked for, and the answers of an engine."""

from __future__ import annotations

from typing import Any

from headway import LLM, SamplingParams
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
CASES = [(PROMPTS[number % 6], params) for number, params in enumerate(PARAMS)]
BEGINNING_ALIKE = [(PROMPTS[0], params) for params in PARAMS]


def answers(llm: LLM) -> list[Any]:
    """All that a request can be told, alone and beside others that begin alike; and again, when prefixes are cached."""
    found = []
    for cases in ([*CASES, *BEGINNING_ALIKE], CASES):
        params = [SamplingParams(max_tokens=36, **options) for _, options in cases]
        for output in llm.generate([prompt for prompt, _ in cases], params):
            for each in output.outputs:
                places = each.logprobs or ()
                chosen = [(token, round(one.logprob, 3)) for place in places for token, one in place.items()]
                found.append((tuple(each.token_ids), each.text, each.finish_reason, each.stop_reason, chosen))
    return found
