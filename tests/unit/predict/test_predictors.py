"""Statistics learn what repeats: beginnings, endings, users, lengths of prompts.

The expected length under a limit, against a simulation.

The oracle, and predictors by name.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.predict import (
    LengthPredictor,
    OraclePredictor,
    PredictorError,
    PredictorFileError,
    PromptView,
    RunningStatistics,
    create_predictor,
)
from headway.predict.predictors import expected_length


def prompt(start: int, *, user: str | None = None, length: int = 60, max_tokens: int | None = 4000) -> PromptView:
    return PromptView([*range(start, start + 48), *[7] * (length - 48)], max_tokens=max_tokens, user=user)


def test_follows_the_beginning_of_the_prompt() -> None:
    statistics = RunningStatistics()
    first, second = statistics.predict([prompt(1), prompt(1000)])
    assert first == second > 1, "nothing was seen yet"
    for _ in range(30):
        statistics.observe(prompt(1), 20)
        statistics.observe(prompt(1000), 800)
    short, unknown, long = statistics.predict([prompt(1), prompt(5000), prompt(1000)])
    assert short < 60 < unknown < 500 < long


def test_follows_the_user() -> None:
    statistics = RunningStatistics()
    draw = random.Random(0)
    for _ in range(40):
        statistics.observe(prompt(draw.randrange(10**6), user="terse"), 10)
        statistics.observe(prompt(draw.randrange(10**6), user="wordy"), 900)
    terse, wordy = statistics.predict([prompt(5, user="terse"), prompt(5, user="wordy")])
    assert terse < 40 < 300 < wordy


def test_one_odd_answer_moves_a_bucket_only_a_little() -> None:
    statistics = RunningStatistics()
    for start in range(0, 50_000, 1000):
        statistics.observe(prompt(start), 100)
    statistics.observe(prompt(99_000), 3000)
    (guess,) = statistics.predict([prompt(99_000)])
    assert 100 < guess < 1500


def test_a_cut_answer_does_not_count_as_short() -> None:
    statistics = RunningStatistics()
    for _ in range(30):
        statistics.observe(prompt(1), 500)
    (before,) = statistics.predict([prompt(1)])
    for _ in range(200):
        statistics.observe(prompt(1, max_tokens=16), 16)
    (after,) = statistics.predict([prompt(1)])
    assert after == pytest.approx(before, rel=0.3)
    assert statistics.predict([prompt(1, max_tokens=16)])[0] <= 16


def test_forgets_what_is_long_past() -> None:
    statistics = RunningStatistics()
    for length in [1000] * 2000 + [10] * 2000:
        statistics.observe(prompt(1), length)
    assert statistics.predict([prompt(1)])[0] < 20


def test_predicting_changes_nothing_and_odd_prompts_are_fine() -> None:
    statistics = RunningStatistics()
    statistics.observe(PromptView([5]), 0)
    odd = [PromptView([5]), PromptView([0] * 100_000), PromptView([2**31 - 1], max_tokens=1, user="")]
    assert statistics.predict(odd) == statistics.predict(odd)
    assert all(guess >= 1 for guess in statistics.predict(odd))


@pytest.mark.parametrize("max_tokens", [20, 100, 512, None])
def test_mean_of_the_cut_distribution(max_tokens: int | None) -> None:
    samples = np.exp(np.random.default_rng(0).normal(4.5, 0.8, 400_000))
    mean = np.minimum(samples, max_tokens or np.inf).mean()
    assert expected_length(4.5, 0.8, max_tokens) == pytest.approx(mean, rel=0.01)


def test_the_order_stays_beyond_the_limit() -> None:
    lengths = [expected_length(log_length, 0.8, 100) for log_length in np.linspace(2, 7, 50)]
    assert all(a < b for a, b in itertools.pairwise(lengths))
    assert lengths[-1] <= 100
    assert (expected_length(-50.0, 0.0, 10), expected_length(1e9, 0.5, 16)) == (1, 16)
    assert math.isfinite(expected_length(1e9, 0.5, None))


def test_oracle_by_request_id_and_by_function() -> None:
    by_id = OraclePredictor({"a": 3, "b": 70})
    by_id.observe(PromptView([1], request_id="a"), 5)
    assert by_id.predict([PromptView([1], request_id="b"), PromptView([1], request_id="a")]) == [70, 3]
    assert OraclePredictor(lambda prompt: len(prompt.prompt_token_ids)).predict([PromptView([1, 2])]) == [2]
    for unknown in (None, "c"):
        with pytest.raises(PredictorError, match="has no length for request"):
            by_id.predict([PromptView([1], request_id=unknown)])


def test_by_name(tmp_path: Path) -> None:
    assert create_predictor("none") is None
    assert isinstance(create_predictor("statistics"), RunningStatistics)
    oracle: LengthPredictor | None = create_predictor("oracle")
    assert oracle is not None and oracle.predict([PromptView([1], max_tokens=33)]) == [33]
    with pytest.raises(PredictorError, match="max_tokens"):
        oracle.predict([PromptView([1])])
    with pytest.raises(ConfigError, match="there is no file 'statistic'"):
        create_predictor("statistic")
    with pytest.raises(PredictorFileError, match="Cannot read"):
        create_predictor(str(tmp_path))
