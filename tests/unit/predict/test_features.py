"""Features: the same everywhere, bounded in cost, and with text only where there is text."""

from __future__ import annotations

import numpy as np
import pytest

from headway.predict import PromptView
from headway.predict.features import GRAM_COLUMNS, MOST_TOKENS, NUM_FEATURES, NUM_PLAIN, feature_matrix, prompt_features
from headway.predict.text_cues import CUE_NAMES, NUM_CUES, text_cues


def cues(text: str) -> dict[str, float]:
    return dict(zip(CUE_NAMES, text_cues(text), strict=True))


def test_values_do_not_change_between_versions() -> None:
    """Models and logs that people have keep their meaning; if this must change, so must `FEATURES_VERSION`."""
    features = prompt_features(PromptView([10, 20, 30, 20], max_tokens=7, user="ann"))
    assert features.keys.heads == (22113, 22113, 22113, 22113)
    assert features.keys.tails == (45375, 45375, 45375)
    assert features.keys.user == 58158
    assert np.flatnonzero(np.frombuffer(features.grams, np.uint8)).tolist() == [
        60,
        75,
        194,
        572,
        587,
        609,
        612,
        706,
        766,
    ]
    assert features.distinct_share == 0.75


def test_matrix() -> None:
    prompts = [PromptView([1, 2, 3]), PromptView([4], max_tokens=9, text="Why?")]
    matrix = feature_matrix([prompt_features(prompt) for prompt in prompts])
    assert matrix.shape == (2, NUM_FEATURES) and NUM_FEATURES == NUM_PLAIN + NUM_CUES + GRAM_COLUMNS
    assert np.isnan(matrix[0, 1]) and np.isnan(matrix[0, NUM_PLAIN : NUM_PLAIN + NUM_CUES]).all()
    assert np.isfinite(matrix[1]).all()
    assert feature_matrix([]).shape == (0, NUM_FEATURES)


def test_of_long_prompts_the_ends_are_read() -> None:
    half = MOST_TOKENS // 2
    first, last = list(range(half)), list(range(5000, 5000 + half))
    one, other = (prompt_features(PromptView([*first, *[9] * middle, *last])) for middle in (10, 100_000))
    assert one.grams == other.grams
    assert one.keys.heads == other.keys.heads


def test_token_ids_may_be_any_sequence() -> None:
    assert prompt_features(PromptView((1, 2, 3))) == prompt_features(PromptView([1, 2, 3]))
    assert prompt_features(PromptView([]))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Please write a story about a fox.", "says_story"),
        ("Translate into German: good morning", "says_translate"),
        ("How many apples are left?", "says_count"),
        ("How many apples are left?", "ends_with_question"),
        ("<|im_start|>user\nIs it far?<|im_end|>\n<|im_start|>assistant\n", "ends_with_question"),
    ],
)
def test_cues_of_the_text(text: str, name: str) -> None:
    assert cues(text)[name] == 1
    assert cues("Good morning.")[name] == 0


@pytest.mark.parametrize("piece", [" ", "\n", "9", "9 -", "<|", "a?", "[INST]"])
@pytest.mark.timeout(10)
def test_no_text_takes_long(piece: str) -> None:
    text_cues(piece * 1_000_000 + "x")


def test_an_amount_asked_for_is_read() -> None:
    assert cues("Write a 300 word summary.")["log_amount"] == pytest.approx(np.log1p(300), abs=1e-3)
    assert cues("")["log_amount"] == 0
