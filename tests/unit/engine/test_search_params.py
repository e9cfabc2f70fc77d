"""What may be asked of `best_of` and beam search, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import InvalidRequestError
from headway.sampling_params import BeamSearchParams, SamplingParams

BEAMS = {"use_beam_search": True}


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    return caught.value


CHANGING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
CHANGING |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["x"], "bad_words": ["x"]}
CHANGING |= {"logprobs": 0, "prompt_logprobs": 0, "logit_bias": {1: 1.0}}


@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_probabilities_is_refused_with_beams_and_named(name: str) -> None:
    error = refusal(use_beam_search=True, n=2, **{name: CHANGING[name]})
    assert error.param == name
    assert "use_beam_search" in str(error)


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0}, {"temperature": 1e-7}, {"temperature": 1}, {"top_k": -1}, {"seed": 3}, {"stop": []}],
    ids=str,
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(use_beam_search=True, n=2, **fields)
    assert params.num_choices == 2
    assert not params.can_stream and not params.chooses_best


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(("best_of", fields) for fields in ({"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": 3, "temperature": 0})),
        ("n", {"n": 2, "best_of": 3, "temperature": 0}),
        ("length_penalty", {"length_penalty": 0.5}),
        *(("early_stopping", {"early_stopping": value}) for value in (True, "never")),
        *(("length_penalty", BEAMS | {"length_penalty": value}) for value in (-10.1, 11, float("nan"), "1", None)),
        *(("early_stopping", BEAMS | {"early_stopping": value}) for value in (None, 1, 0, "always", "", [True], 1.0)),
    ],
    ids=str,
)
def test_what_is_wrong_or_does_not_go_together_is_named(name: str, fields: dict[str, Any]) -> None:
    assert refusal(**fields).param == name


def test_best_of() -> None:
    assert SamplingParams(n=2, best_of=5).num_choices == 5
    assert SamplingParams(n=2, best_of=5).chooses_best
    assert not SamplingParams(n=2, best_of=5).can_stream
    assert SamplingParams(n=5, best_of=5).can_stream
    assert SamplingParams(n=5).can_stream
    assert SamplingParams(best_of=1, temperature=0).num_choices == 1


def test_each_of_best_of_has_a_seed_of_its_own_and_is_compared_by_logprobs() -> None:
    choices = [SamplingParams(n=1, best_of=3, seed=5).for_choice(index) for index in range(3)]
    assert [(each.n, each.best_of, each.seed, each.logprobs) for each in choices] == [
        (1, None, 5 + i, 0) for i in range(3)
    ]
    assert SamplingParams(n=1, best_of=3, logprobs=4).for_choice(2).logprobs == 4
    assert SamplingParams(n=3).for_choice(2).logprobs is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [(True, True), (False, False), ("never", "never"), ("true", True), ("False", False), ("NEVER", "never")],
)
def test_early_stopping(given: Any, kept: bool | str) -> None:
    assert SamplingParams(use_beam_search=True, early_stopping=given).early_stopping is kept


def test_beam_search_params_are_sampling_params() -> None:
    own: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True, "length_penalty": 0.5, "early_stopping": "never"}
    params = BeamSearchParams(beam_width=3, stop_token_ids=[4], **own)
    expected = SamplingParams(n=3, temperature=0.0, use_beam_search=True, stop_token_ids=[4], **own)
    assert params.sampling_params() == expected


@pytest.mark.parametrize(
    "fields", [{"beam_width": 0}, {"beam_width": 1.5}, {"max_tokens": 0}, {"length_penalty": 99.0}], ids=str
)
def test_bad_beam_search_params_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, **fields})
    assert caught.value.param in fields
