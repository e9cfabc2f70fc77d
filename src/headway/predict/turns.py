"""The messages of a conversation, found in token ids alone, whatever the tokenizer and the chat template.

Most templates open each message with one token and then its role, and a prompt ends where an answer has been opened:

    <open> system ... <open> user ... <open> assistant ... <open> user ... <open> assistant

So the token that opens is among the first two (one may mark the beginning of all) and again among the last few, and the
role after its last place is the one that answers. A prompt where that does not hold is taken for one message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OPENER_PLACES = 8
"""An answer is opened with at most so many tokens."""
TURN_NAMES = (
    "num_questions",
    "log_last_question",
    "log_first_question",
    "log_question_before",
    "mean_log_answer",
    "log_last_answer",
    "log_shortest_answer",
    "log_longest_answer",
)
NUM_TURNS = len(TURN_NAMES)

Ids = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Turns:
    """Messages' lengths with what the template adds to each, in order."""

    last_start: int
    """Where the last message begins, and where it ends."""
    last_end: int
    questions: tuple[int, ...]
    """Of whoever wrote the last message, which is the last of them."""
    answers: tuple[int, ...]
    """Of whoever is to answer now."""

    def numbers(self) -> tuple[float, ...]:
        """One per name of `TURN_NAMES`, 0 where there is none, rounded as they are logged."""
        questions = [math.log1p(length) for length in self.questions]
        answers = [math.log1p(length) for length in self.answers] or [0.0]
        numbers = (
            float(len(questions)),
            questions[-1],
            questions[0],
            questions[-2] if len(questions) > 1 else 0.0,
            sum(answers) / len(answers),
            answers[-1],
            min(answers),
            max(answers),
        )
        return tuple(round(number, 4) for number in numbers)


def find_turns(ids: Ids) -> Turns:
    opener = _opener(ids)
    starts = [] if opener is None else np.flatnonzero(ids[:-1] == opener).tolist()
    if len(starts) < 2:
        return Turns(0, len(ids), (len(ids),), ())
    roles = ids[np.array(starts) + 1].tolist()
    lengths = np.diff(starts).tolist()
    return Turns(
        last_start=starts[-2],
        last_end=starts[-1],
        questions=tuple(length for length, role in zip(lengths, roles) if role == roles[-2]),
        answers=tuple(length for length, role in zip(lengths, roles[:-1]) if role == roles[-1]),
    )


def _opener(ids: Ids) -> int | None:
    end = ids[2:][-OPENER_PLACES:-1].tolist()
    return next((token for token in ids[:2].tolist() if token in end), None)
