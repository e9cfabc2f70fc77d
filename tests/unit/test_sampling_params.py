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

FLAGS = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"]


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    return caught.value


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (good, _) in REAL_FIELDS.items() for v in good])
def test_real_values_are_kept_as_floats(name: str, value: float) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == value
    assert type(kept) is float


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, (_, bad) in REAL_FIELDS.items() for v in [*bad, *NOT_NUMBERS]]
)
def test_real_values_out_of_range_name_field_value_and_range(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert name in str(error)
    assert "number" in str(error)
    if not isinstance(value, int) or value < 10**50:
        assert repr(value) in str(error)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (good, _) in INTEGER_FIELDS.items() for v in good])
def test_integers_are_kept(name: str, value: int | None) -> None:
    assert getattr(SamplingParams(**{"max_tokens": None, name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, (_, bad) in INTEGER_FIELDS.items() for v in [*bad, 1.0, 1.5, True, "3", math.nan]]
)
def test_bad_integers_name_field_and_range(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert "integer from" in str(error)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_flags_must_be_booleans(name: str, value: Any) -> None:
    assert refusal(**{name: value}).param == name


@pytest.mark.parametrize("name", FLAGS)
def test_flags_accept_booleans(name: str) -> None:
    assert getattr(SamplingParams(**{name: True}), name) is True
    assert getattr(SamplingParams(**{name: False}), name) is False


def test_a_number_too_long_to_print_is_still_refused_clearly() -> None:
    assert refusal(n=10**9000).param == "n"
    assert refusal(temperature=10**9000).param == "temperature"


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(4))
    assert (type(params.temperature), type(params.top_k), type(params.seed)) == (float, int, int)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, ()), ("x", ("x",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())]
)
def test_stop_is_always_a_tuple(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop_strings == kept


@pytest.mark.parametrize("value", ["", [""], ["a", ""], [1], 5, {"a": 1}, b"x", [None]])
def test_bad_stops(value: Any) -> None:
    assert refusal(stop=value).param == "stop"


@pytest.mark.parametrize("value", ["word", [""], [3], 5, {"a": 1}])
def test_bad_bad_words(value: Any) -> None:
    assert refusal(bad_words=value).param == "bad_words"


@pytest.mark.parametrize("value", [[-1], ["1"], [1.0], [True], "12", 5, [2**31]])
def test_bad_stop_token_ids(value: Any) -> None:
    assert refusal(stop_token_ids=value).param == "stop_token_ids"


@pytest.mark.parametrize(
    "value",
    [[1], {-1: 1}, {"x": 1}, {1: 101}, {1: math.nan}, {1: "2"}, {1: True}, {True: 1}, {1.5: 1}, 3, {"1" * 20: 1}],
)
def test_bad_logit_bias(value: Any) -> None:
    assert refusal(logit_bias=value).param == "logit_bias"


def test_logit_bias_takes_json_keys_and_copies() -> None:
    given: dict[Any, Any] = {"5": 2, 7: -100}
    params = SamplingParams(logit_bias=given)
    given[7] = 0
    assert params.logit_bias == {5: 2.0, 7: -100.0}
    assert SamplingParams(logit_bias={}).logit_bias is None


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
    [("temprature", "temperature"), ("topk", "top_k"), ("max_new_tokens", "max_tokens"), ("Seed", "seed")],
)
def test_unknown_names_suggest_the_nearest(name: str, nearest: str) -> None:
    for make in (lambda: SamplingParams(**{name: 1}), lambda: SamplingParams.from_dict({name: 1})):
        with pytest.raises(InvalidRequestError, match=f"{name}.*{nearest}") as caught:
            make()
        assert caught.value.param == name


def test_a_name_like_no_other_lists_all() -> None:
    with pytest.raises(InvalidRequestError, match="temperature, top_p, top_k"):
        SamplingParams.from_dict({"qqq": 1})


def test_the_resolved_bad_words_are_not_an_option() -> None:
    assert refusal(bad_word_token_ids=((1,),)).param == "bad_word_token_ids"


def test_from_dict_equals_the_constructor() -> None:
    fields = {"temperature": 0.5, "stop": ["a"], "logit_bias": {"3": 1}, "max_tokens": 4}
    assert SamplingParams.from_dict(fields) == SamplingParams(**fields)
    with pytest.raises(InvalidRequestError, match="mapping"):
        SamplingParams.from_dict([("n", 1)])  # type: ignore[arg-type]


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens, params.top_k, params.top_p) == (1, 1.0, 16, 0, 1.0)
    assert not params.greedy
    assert not params.is_penalised


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (1, False)])
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.1}])
def test_is_penalised(fields: dict[str, float]) -> None:
    assert SamplingParams(**fields).is_penalised


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


def test_minus_zero_is_zero() -> None:
    params = SamplingParams(temperature=-0.0, min_p=-0.0, presence_penalty=-0.0)
    assert [str(value) for value in (params.temperature, params.min_p, params.presence_penalty)] == ["0.0"] * 3


def test_named_tokens_bring_logprobs_with_them() -> None:
    assert SamplingParams(logprob_token_ids=[]).logprobs is None
    params = SamplingParams(logprob_token_ids=[3, 1, 3])
    assert (params.logprob_token_ids, params.logprobs) == ((3, 1), 0)
    assert SamplingParams(logprob_token_ids=[3], logprobs=2).logprobs == 2
    for bad in ([-1], ["a"], "ab", range(129), [True]):
        assert refusal(logprob_token_ids=bad).param == "logprob_token_ids"
    assert refusal(logprob_token_ids=[3], use_beam_search=True, temperature=0).param in (
        "logprobs",
        "logprob_token_ids",
    )
    with pytest.raises(InvalidRequestError, match="logprob_token_ids"):
        SamplingParams(logprob_token_ids=[10]).validate_for_vocabulary(10)
