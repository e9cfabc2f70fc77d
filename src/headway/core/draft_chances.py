"""How likely guesses are to be right: counted by what they rest on and by their place in a draft.

    kind     how long the match was that the guess rests on, and how the last guess of its request went
    place    first, second, … token of a draft; one counts only if all before it were right

Of a kind that has hardly been seen, as much is assumed as of all kinds together, and of these at first what the
proposer says. Counts are halved now and then, so that they follow what requests do now.
"""

from __future__ import annotations

from headway.core.proposers import FORCED
from headway.core.tuning import SPECULATION

NO_HISTORY, _WRONG, _PARTLY, _RIGHT = range(4)
_MATCH_CLASSES = (3, 5, 9, 16, FORCED)
"""From which length on a match is of the next class."""


def kind_of(num_matched: int, history: int) -> int:
    """Guesses of the same kind are equally likely to be right."""
    match_class = sum(num_matched >= start for start in _MATCH_CLASSES)
    return match_class * (_RIGHT + 1) + history


def history_of(num_drafts: int, num_right: int) -> int:
    """How a draft went."""
    return _RIGHT if num_right == num_drafts else _PARTLY if num_right else _WRONG


class DraftChances:
    """How often guesses were right, given that those before them in their draft were."""

    def __init__(self, num_places: int, prior: float) -> None:
        """`prior`: how often the first ones are taken to be right."""
        self._prior = prior
        num_kinds = (len(_MATCH_CLASSES) + 1) * (_RIGHT + 1)
        self._right = [[0.0] * num_places for _ in range(num_kinds + 1)]  # the last one: of all kinds
        self._all = [[0.0] * num_places for _ in range(num_kinds + 1)]

    def survival(self, kind: int) -> list[float]:
        """For each place, how likely it is that all guesses up to it are right."""
        weight = 2.0  # of what is assumed, in guesses
        survival, found = 1.0, []
        for right, total, any_right, any_total in zip(
            self._right[kind], self._all[kind], self._right[-1], self._all[-1], strict=True
        ):
            assumed = (any_right + weight * self._prior) / (any_total + weight)
            survival *= (right + weight * assumed) / (total + weight)
            found.append(survival)
        return found

    def count(self, kind: int, num_drafts: int, num_right: int) -> None:
        """Note a draft. What follows a wrong guess says nothing."""
        for right, total in ((self._right[kind], self._all[kind]), (self._right[-1], self._all[-1])):
            for place in range(min(num_drafts, num_right + 1)):
                if total[place] >= SPECULATION.max_counted:
                    right[place] *= 0.5
                    total[place] *= 0.5
                right[place] += place < num_right
                total[place] += 1.0

    def fade(self) -> None:
        """Forget half, so that what did not work is tried again."""
        for counts in (*self._right, *self._all):
            counts[:] = [0.5 * count for count in counts]
