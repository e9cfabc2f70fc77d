"""Features: the same everywhere, bounded in cost, and with text only where there is text.

Messages in token ids: found with any template that opens them with one token, and never invented.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.predict import PromptView
from headway.predict.features import (
    CUES_START,
    FEATURES_VERSION,
    GRAM_COLUMNS,
    GRAMS_START,
    MOST_TOKENS,
    NUM_FEATURES,
    TURN_NAMES,
    feature_matrix,
    find_turns,
    prompt_features,
)
from headway.predict.text_cues import CUE_NAMES, last_message, text_cues


def cues(text: str) -> dict[str, float]:
    return dict(zip(CUE_NAMES, text_cues(text), strict=True))


def test_values_do_not_change_between_versions() -> None:
    """Models and logs that people have keep their meaning; if this must change, so must `FEATURES_VERSION`."""
    features = prompt_features(PromptView([10, 20, 30, 20], max_tokens=7, user="ann"))
    assert features.keys.heads == (22113, 22113, 22113, 22113)
    assert features.keys.tails == (45375, 45375, 45375)
    assert features.keys.user == 58158
    set_columns = np.flatnonzero(np.frombuffer(features.grams, np.uint8)).tolist()
    assert set_columns == [60, 75, 194, 572, 587, 706, 1121, 1124, 1278]
    assert features.distinct_share == 0.75
    assert features.turns == (1.0, 1.6094, 1.6094, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert FEATURES_VERSION == 2 and NUM_FEATURES == 1593


def test_matrix() -> None:
    prompts = [PromptView((1, 2, 3)), PromptView([4], max_tokens=9, text="Why?")]
    assert prompt_features(prompts[0]) == prompt_features(PromptView([1, 2, 3]))
    matrix = feature_matrix([prompt_features(prompt) for prompt in prompts])
    assert matrix.shape == (2, NUM_FEATURES) and NUM_FEATURES == GRAMS_START + GRAM_COLUMNS
    assert np.isnan(matrix[0, 1]) and np.isnan(matrix[0, CUES_START:GRAMS_START]).all()
    assert np.isfinite(matrix[0, 2:CUES_START]).all()
    assert np.isfinite(matrix[1]).all()
    assert feature_matrix([]).shape == (0, NUM_FEATURES)


def test_of_long_prompts_the_ends_are_read() -> None:
    half = MOST_TOKENS // 2
    first, last = list(range(half)), list(range(5000, 5000 + half))
    one, other = (prompt_features(PromptView([*first, *[9] * middle, *last])) for middle in (10, 100_000))
    assert one.grams == other.grams
    assert one.keys.heads == other.keys.heads


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Please write a story about a fox.", "says_story"),
        ("Translate into German: good morning", "says_translate"),
        ("How many apples are left?", "says_count"),
        ("How many apples are left?", "ends_with_question"),
        ("Translate this. " + "blah " * 300 + "Be brief.", "says_translate"),
        ("Translate this. " + "blah " * 300 + "Be brief.", "says_brief"),
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


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Write a 300 word summary.", 1.3 * 300),
        ("Write three short paragraphs, then one sentence.", 3 * 90),
        ("In 9999 sections, please.", 10_000),
        ("It costs 30 dollars.", 0),
        ("", 0),
    ],
)
def test_an_amount_asked_for_is_read(text: str, tokens: float) -> None:
    assert cues(text)["log_amount"] == pytest.approx(np.log1p(tokens), abs=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nWrite a poem.<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
        "<|im_start|>user\nIs it far?<|im_end|>\n<|im_start|>assistant\n",
        "<|start_header_id|>user<|end_header_id|>\n\nIs it far?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<start_of_turn>user\nIs it far?<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] Write a poem. [/INST] No.</s>[INST] Is it far? [/INST]",
        "Is it far?",
    ],
)
def test_the_last_message_is_found_in_the_text(text: str) -> None:
    assert last_message(text) == "Is it far?"
    assert cues(text)["says_poem"] == 0


OPEN, END, LINE = 1, 2, 198
SYSTEM, USER, ASSISTANT = 5, 6, 7
CHAT = [(SYSTEM, 4), (USER, 9), (ASSISTANT, 30), (USER, 2), (ASSISTANT, 10), (USER, 5)]


def chat(
    messages: list[tuple[int, int]], *, before: tuple[int, ...] = (), opening: tuple[int, ...] = (LINE,)
) -> list[int]:
    """Messages of so many tokens each, and an answer that is opened."""
    ids = list(before)
    for role, length in messages:
        ids += [OPEN, role, *opening, *range(1000, 1000 + length), END]
    return [*ids, OPEN, ASSISTANT, *opening]


def numbers(ids: list[int]) -> dict[str, float]:
    return dict(zip(TURN_NAMES, find_turns(np.array(ids, np.uint64)).numbers(), strict=True))


@pytest.mark.parametrize("before", [(), (77,)])
@pytest.mark.parametrize("opening", [(LINE,), (9531, LINE), (8, LINE, LINE)])
def test_lengths_of_questions_and_answers(before: tuple[int, ...], opening: tuple[int, ...]) -> None:
    ids = chat(CHAT, before=before, opening=opening)
    turns = find_turns(np.array(ids, np.uint64))
    more = 3 + len(opening)
    assert turns.questions == (9 + more, 2 + more, 5 + more)
    assert turns.answers == (30 + more, 10 + more)
    assert ids[turns.last_start : turns.last_end] == [OPEN, USER, *opening, *range(1000, 1005), END]
    found = numbers(ids)
    logs = {"last_question": 5, "question_before": 2, "last_answer": 10, "shortest_answer": 10, "longest_answer": 30}
    assert found["num_questions"] == 3
    for name, length in logs.items():
        assert found[f"log_{name}"] == pytest.approx(math.log1p(length + more), abs=1e-4), name
    first = numbers(chat(CHAT[:2]))
    assert (first["num_questions"], first["log_last_answer"], first["log_question_before"]) == (1, 0, 0)


@pytest.mark.parametrize("ids", [[], [5], [5, 5], [5, 6, 7, 8], list(range(50)), [3] * 40])
def test_what_is_no_conversation_is_no_trouble(ids: list[int]) -> None:
    assert all(map(math.isfinite, numbers(ids).values()))
    if len(set(ids)) == len(ids) > 0:
        turns = find_turns(np.array(ids, np.uint64))
        assert (turns.last_start, turns.last_end, turns.questions, turns.answers) == (0, len(ids), (len(ids),), ())
