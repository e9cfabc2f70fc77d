"""What a request may ask for: every field's accepted values, every refusal and what it says."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from headway.errors import InvalidRequestError
from headway.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None, [1], 10**400]

REAL_FIELDS = {
    "temperature": ([0, 0.0, 1e-9, 0.7, 2, 100.0], [-1e-9, -1, 100.1, 1e300]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0001]),
    "min_p": ([0, 0.05, 1], [-0.01, 1.01]),
    "repetition_penalty": ([0.01, 1, 1.3, 100], [0, -1, 0.009, 1e-30, 1e-300, 5e-324, 101, 1e30]),
    "presence_penalty": ([-2, 0, 2], [-2.01, 2.01]),
    "frequency_penalty": ([-2.0, 0.5, 2.0], [-3, 3]),
}

INTEGER_FIELDS = {
    "n": ([1, 7, MAX_N], [0, -1, MAX_N + 1, None]),
    "top_k": ([-1, 0, 1, 50, 2**31 - 1], [-2, 2**31, None]),
    "seed": ([None, 0, -1, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1]),
    "max_tokens": ([None, 1, 4096], [0, -1, 2**31]),
    "min_tokens": ([0, 3], [-1, 2**40, None]),
    "logprobs": ([None, 0, 5, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    "prompt_logprobs": ([None, 0, 1], [-1, 10**9]),
}


FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
OTHER_VALUES = {
    "stop": ["", [""], ["a", ""], [1], 5, {"a": 1}, b"x", [None]],
    "bad_words": ["word", [""], [3], 5, {"a": 1}],
    "stop_token_ids": [[-1], ["1"], [1.0], [True], "12", 5, [2**31]],
    "logit_bias": [[1], {-1: 1}, {"x": 1}, {1: 101}, {1: math.nan}, {1: "2"}, {1: True}, {True: 1}, {1.5: 1}, 3],
    "logprob_token_ids": [[-1], ["a"], "ab", range(129), [True]],
    "bad_word_token_ids": [((1,),)],  # what they are resolved to is no option
    **{name: [1, 0, "true", None] for name in FLAGS},
}
BAD = {
    **{name: ("number", [*bad, *NOT_NUMBERS]) for name, (_, bad) in REAL_FIELDS.items()},
    **{name: ("integer from", [*bad, 1.0, 1.5, True, "3", math.nan]) for name, (_, bad) in INTEGER_FIELDS.items()},
    **{name: ("", bad) for name, bad in OTHER_VALUES.items()},
}


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    return caught.value


@pytest.mark.parametrize("name", [*REAL_FIELDS, *INTEGER_FIELDS, *FLAGS])
def test_values_in_range_are_kept(name: str) -> None:
    for value in {**REAL_FIELDS, **INTEGER_FIELDS}.get(name, ([True, False],))[0]:
        kept = getattr(SamplingParams(**{"max_tokens": None, name: value}), name)
        assert kept == value
        assert type(kept) is (float if name in REAL_FIELDS else type(value))


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_none_name_their_field_and_range(name: str) -> None:
    kind, values = BAD[name]
    for value in values:
        error = refusal(**{name: value})
        assert error.param == name, value
        assert name in str(error) and kind in str(error), value
        if name in REAL_FIELDS and value != 10**400:
            assert repr(value) in str(error)


def test_numpy_numbers_and_minus_zero_become_plain() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(4), min_p=-0.0)
    assert (type(params.temperature), type(params.top_k), type(params.seed)) == (float, int, int)
    assert str(params.min_p) == "0.0"
    for name in ("n", "temperature"):
        assert refusal(**{name: 10**9000}).param == name, "too long to print, and refused all the same"


@pytest.mark.parametrize(
    ("fields", "greedy", "penalised"),
    [
        ({"temperature": 0}, True, False),
        ({"temperature": 9.9e-6}, True, False),
        ({"temperature": 1e-5}, False, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": -1}, False, True),
        ({"frequency_penalty": 0.1}, False, True),
    ],
    ids=str,
)
def test_what_is_greedy_or_penalised(fields: dict[str, float], greedy: bool, penalised: bool) -> None:
    params = SamplingParams(**fields)
    assert (params.greedy, params.is_penalised) == (greedy, penalised)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, ()), ("x", ("x",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())]
)
def test_stop_is_always_a_tuple(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop_strings == kept


def test_conflicts_name_both_sides() -> None:
    error = refusal(min_tokens=9, max_tokens=8)
    assert error.param == "min_tokens"
    assert "9" in str(error)
    assert "8" in str(error)
    assert refusal(stop="x", detokenize=False).param == "stop"
    assert refusal(n=2, temperature=0).param == "n"
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("max_new_tokens", "max_tokens"),
        ("Seed", "seed"),
        ("qqq", "temperature, top_p, top_k"),
    ],
)
def test_unknown_names_suggest_the_nearest(name: str, nearest: str) -> None:
    for make in (lambda: SamplingParams(**{name: 1}), lambda: SamplingParams.from_dict({name: 1})):
        with pytest.raises(InvalidRequestError, match=f"{name}.*{nearest}") as caught:
            make()
        assert caught.value.param == name


def test_from_dict_equals_the_constructor() -> None:
    fields = {"temperature": 0.5, "stop": ["a"], "logit_bias": {"3": 1}, "max_tokens": 4}
    assert SamplingParams.from_dict(fields) == SamplingParams(**fields)
    given: dict[Any, Any] = {"5": 2, 7: -100}
    params = SamplingParams(logit_bias=given)
    given[7] = 0
    assert params.logit_bias == {5: 2.0, 7: -100.0}, "a copy, with numbers for JSON's keys"
    assert SamplingParams(logit_bias={}).logit_bias is None
    with pytest.raises(InvalidRequestError, match="mapping"):
        SamplingParams.from_dict([("n", 1)])  # type: ignore[arg-type]


def test_vocabulary() -> None:
    params = SamplingParams(stop_token_ids=[9], logit_bias={8: 1}, logprobs=10)
    params.validate_for_vocabulary(10)
    cases = [
        (SamplingParams(stop_token_ids=[3, 10]), "stop_token_ids"),
        (SamplingParams(logit_bias={10: 1}), "logit_bias"),
        (SamplingParams(logprobs=11), "logprobs"),
        (SamplingParams(prompt_logprobs=11), "prompt_logprobs"),
        (SamplingParams(bad_words=["x"]).with_bad_word_token_ids([[1, 12]]), "bad_words"),
    ]
    for bad, name in cases:
        with pytest.raises(InvalidRequestError) as caught:
            bad.validate_for_vocabulary(10)
        assert caught.value.param == name


def test_is_frozen_and_travels() -> None:
    params = SamplingParams(stop="x", logit_bias={1: 2}, bad_words=["a"]).with_bad_word_token_ids([[1], [], [2, 3]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params
        assert twin.bad_word_token_ids == ((1,), (2, 3))
        assert hash(twin) == hash(params)


def test_each_choice_has_its_own_seed() -> None:
    params = SamplingParams(n=3, seed=2**64 - 1, temperature=1)
    choices = [params.for_choice(index) for index in range(3)]
    assert [choice.n for choice in choices] == [1, 1, 1]
    assert [choice.seed for choice in choices] == [2**64 - 1, 0, 1]
    assert SamplingParams(n=2).for_choice(1).seed is None


def test_named_tokens_bring_logprobs_with_them() -> None:
    assert SamplingParams(logprob_token_ids=[]).logprobs is None
    params = SamplingParams(logprob_token_ids=[3, 1, 3])
    assert (params.logprob_token_ids, params.logprobs) == ((3, 1), 0)
    assert SamplingParams(logprob_token_ids=[3], logprobs=2).logprobs == 2
    beams = refusal(logprob_token_ids=[3], use_beam_search=True, temperature=0)
    assert beams.param in ("logprobs", "logprob_token_ids")
    with pytest.raises(InvalidRequestError, match="logprob_token_ids"):
        SamplingParams(logprob_token_ids=[10]).validate_for_vocabulary(10)
