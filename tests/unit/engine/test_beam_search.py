"""The choice of beams: against a search through all sequences, and each rule by itself."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from headway.core import TokenLogprobs
from headway.engine.beam_search import Beam, BeamRules, BeamSearch

Model = Callable[[tuple[int, ...]], list[float]]
"""Output tokens so far → the logprob of each next token."""


def make_rules(**changes: object) -> BeamRules:
    fields: dict[str, object] = {
        "width": 2,
        "max_tokens": 3,
        "min_tokens": 0,
        "stop_token_ids": frozenset(),
        "length_penalty": 1.0,
        "early_stopping": False,
    }
    return BeamRules(**{**fields, **changes})  # type: ignore[arg-type]


def random_model(vocab_size: int, seed: int) -> Model:
    def model(tokens: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed}{tokens}")
        weights = [rng.random() ** 3 for _ in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return model


def most_likely(logprobs: list[float], count: int) -> TokenLogprobs:
    order = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:count]
    return TokenLogprobs(order[0], logprobs[order[0]], 1, order, [logprobs[token] for token in order])


def search(model: Model, rules: BeamRules) -> BeamSearch:
    searched = BeamSearch(rules)
    while searched.live:
        searched.advance([most_likely(model(beam.token_ids), rules.num_top) for beam in searched.live])
    return searched


def all_sequences(model: Model, vocab_size: int, rules: BeamRules) -> list[tuple[float, tuple[int, ...]]]:
    """Every sequence that can come out, with its score, the best first."""
    found = []
    for length in range(1, rules.max_tokens + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            stops = [place for place, token in enumerate(tokens) if token in rules.stop_token_ids]
            if (stops and stops != [length - 1]) or (not stops and length < rules.max_tokens):
                continue
            if stops and length <= rules.min_tokens:
                continue
            total = sum(model(tokens[:place])[token] for place, token in enumerate(tokens))
            found.append((total / length**rules.length_penalty, tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize("stops", [set(), {0}, {0, 2}], ids=str)
def test_with_room_for_all_it_finds_the_best_of_all(length_penalty: float, min_tokens: int, stops: set[int]) -> None:
    for seed in range(5):
        model = random_model(3, seed)
        rules = make_rules(
            width=81,
            max_tokens=4,
            min_tokens=min_tokens,
            stop_token_ids=frozenset(stops),
            length_penalty=length_penalty,
            early_stopping="never",
        )
        found = search(model, rules)
        expected = all_sequences(model, 3, rules)
        assert [beam.token_ids for beam in found.best(5)] == [tokens for _, tokens in expected[:5]]
        assert [found.score(beam) for beam in found.best(5)] == pytest.approx([score for score, _ in expected[:5]])


def test_two_beams_find_what_greedy_misses() -> None:
    table = {(): [0.6, 0.4], (0,): [0.5, 0.5], (1,): [0.9, 0.1]}

    def model(tokens: tuple[int, ...]) -> list[float]:
        return [math.log(p) for p in table[tokens]]

    found = search(model, make_rules(max_tokens=2)).hypotheses
    assert [beam.token_ids for beam in found] == [(1, 0), (0, 0)]
    assert found[0].cum_logprob == pytest.approx(math.log(0.36))


def test_equals_go_by_beam_then_by_token() -> None:
    uniform: Model = lambda tokens: [math.log(0.25)] * 4  # noqa: E731
    searched = search(uniform, make_rules(width=3, max_tokens=2))
    assert [beam.token_ids for beam in searched.hypotheses] == [(0, 0), (0, 1), (0, 2)]


def test_an_end_counts_only_among_the_first_and_never_takes_the_place_of_a_beam() -> None:
    logprobs = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    searched = BeamSearch(make_rules(stop_token_ids=frozenset({0, 2})))
    searched.advance([most_likely(logprobs, 4)])
    assert [beam.token_ids for beam in searched.hypotheses] == [(0,)]  # (2,) ends too, but is third of two
    assert [beam.token_ids for beam in searched.live] == [(1,), (3,)]
    assert searched.hypotheses[0].ending == "stop"


def test_when_it_ends() -> None:
    """Early: when enough have ended. By default: when the best beam looks worse. Never: when none can become better."""

    def model(tokens: tuple[int, ...]) -> list[float]:
        end = 0.45 if len(tokens) < 2 else 0.001  # token 0 ends
        rest = 0.5 if len(tokens) < 2 else 0.998
        return [math.log(p) for p in (end, rest, 1 - end - rest)]

    def length_of(early_stopping: bool | str) -> int:
        rules = make_rules(max_tokens=50, stop_token_ids=frozenset({0}), early_stopping=early_stopping)
        searched, num_steps = BeamSearch(rules), 0
        while searched.live:
            searched.advance([most_likely(model(beam.token_ids), rules.num_top) for beam in searched.live])
            num_steps += 1
        return num_steps

    assert length_of(True) == 2
    assert length_of(True) < length_of(False) <= length_of("never") == 50


def test_fewer_continuations_than_beams() -> None:
    searched = search(lambda tokens: [math.log(0.7), math.log(0.3)], make_rules(width=8, max_tokens=2))
    assert len(searched.hypotheses) == 4
    searched = search(lambda tokens: [0.0], make_rules(width=8, max_tokens=3))
    assert [beam.token_ids for beam in searched.hypotheses] == [(0, 0, 0)]


def test_the_best_so_far_may_still_be_going_on() -> None:
    searched = BeamSearch(make_rules(width=2, max_tokens=9, stop_token_ids=frozenset({0})))
    assert searched.best(3) == [Beam()]
    searched.advance([most_likely([math.log(0.3), math.log(0.5), math.log(0.2)], 3)])
    assert [(beam.token_ids, beam.ending) for beam in searched.best(2)] == [((1,), None), ((0,), "stop")]
