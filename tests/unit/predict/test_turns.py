"""Messages in token ids: found with any template that opens them with one token, and never invented."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.predict.features import TURN_NAMES, find_turns

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


def test_numbers_about_them() -> None:
    found = numbers(chat(CHAT))
    assert found["num_questions"] == 3
    assert found["log_last_question"] == pytest.approx(math.log1p(9), abs=1e-4)
    assert found["log_question_before"] == pytest.approx(math.log1p(6), abs=1e-4)
    assert found["log_last_answer"] == found["log_shortest_answer"] == pytest.approx(math.log1p(14), abs=1e-4)
    assert found["log_longest_answer"] == pytest.approx(math.log1p(34), abs=1e-4)
    first = numbers(chat(CHAT[:2]))
    assert (first["num_questions"], first["log_last_answer"], first["log_question_before"]) == (1, 0, 0)


@pytest.mark.parametrize("ids", [[], [5], [5, 5], [5, 6, 7, 8], list(range(50)), [3] * 40])
def test_what_is_no_conversation_is_no_trouble(ids: list[int]) -> None:
    assert all(map(math.isfinite, numbers(ids).values()))


def test_without_an_opened_answer_all_is_one_message() -> None:
    turns = find_turns(np.arange(100, dtype=np.uint64))
    assert (turns.last_start, turns.last_end, turns.questions, turns.answers) == (0, 100, (100,), ())
