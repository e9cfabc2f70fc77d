"""Estimates how likely draft tokens are to be right, from counts by kind and by place in the draft.

    kind     the length of the match that the guess rests on, and the outcome of its request's last guess
    place    first, second, … token of a draft; a token counts only if all before it were right

A kind with few counts is assumed to be like all kinds together, and these are at first assumed to have the proposer's
prior chance. Counts are halved now and then, so that they follow what requests do at present.
"""

from __future__ import annotations

from headway.core.proposers import FORCED
from headway.core.tuning import SPECULATION

NO_HISTORY, _WRONG, _PARTLY, _RIGHT = range(4)
_MATCH_CLASSES = (3, 5, 9, 16, FORCED)
"""The match lengths at which the next class begins."""


def kind_of(num_matched: int, history: int) -> int:
    """Return the kind of a guess. Guesses of the same kind are taken to be equally likely to be right."""
    match_class = sum(num_matched >= start for start in _MATCH_CLASSES)
    return match_class * (_RIGHT + 1) + history


def history_of(num_drafts: int, num_right: int) -> int:
    """Return the outcome of a draft: all, some or none of its tokens were right."""
    return _RIGHT if num_right == num_drafts else _PARTLY if num_right else _WRONG


class DraftChances:
    """Counts how often draft tokens were right, given that those before them in their draft were."""

    def __init__(self, num_places: int, prior: float) -> None:
        """`prior`: the chance assumed before anything has been counted."""
        self._prior = prior
        num_kinds = (len(_MATCH_CLASSES) + 1) * (_RIGHT + 1)
        self._right = [[0.0] * num_places for _ in range(num_kinds + 1)]  # the last list is for all kinds together
        self._all = [[0.0] * num_places for _ in range(num_kinds + 1)]

    def survival(self, kind: int) -> list[float]:
        """Return, for each place, how likely it is that all guesses up to it are right."""
        weight = 2.0  # the assumed chance counts as much as this many guesses
        survival, found = 1.0, []
        for right, total, any_right, any_total in zip(
            self._right[kind], self._all[kind], self._right[-1], self._all[-1], strict=True
        ):
            assumed = (any_right + weight * self._prior) / (any_total + weight)
            survival *= (right + weight * assumed) / (total + weight)
            found.append(survival)
        return found

    def count(self, kind: int, num_drafts: int, num_right: int) -> None:
        """Count the outcome of a draft. Tokens after the first wrong one say nothing and are not counted."""
        for right, total in ((self._right[kind], self._all[kind]), (self._right[-1], self._all[-1])):
            for place in range(min(num_drafts, num_right + 1)):
                if total[place] >= SPECULATION.max_counted:
                    right[place] *= 0.5
                    total[place] *= 0.5
                right[place] += place < num_right
                total[place] += 1.0

    def fade(self) -> None:
        """Halve all counts, so that kinds that did not work are tried again."""
        for counts in (*self._right, *self._all):
            counts[:] = [0.5 * count for count in counts]
