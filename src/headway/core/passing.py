"""How far short prompts may pass a long one that is being computed.

Prompts are computed in the order of the policy, and one that takes many steps would keep all behind it waiting for its
end. So prompts that fit into one step pass it, but not for free: what they take of the steps is counted against the
long one's own progress, and stays below a fixed share of it.

    budget      ████████ ████████ ████████ ████████
    long        ████████ ███████░ ███████░ ██████░░          share 0.15
    passing            ·        a        b       cc          what they leave is the long one's, and theirs later
"""

from __future__ import annotations

from headway.core.request import Request

_ROUNDING = 1e-9


class Passing:
    """The account of the long prompt that is passed now. A share of 0: it is not passed."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._long: Request | None = None
        self._num_before = 0  # tokens it had computed when its account was opened
        self._num_passed = 0

    def allowance(self, long: Request, num_left_tokens: int) -> int:
        """How many of the tokens that a step has left for a long prompt may go to prompts that pass it; at most half of
        them, so that it makes progress in every step."""
        num_own = long.num_computed_tokens - self._num_before
        if long is not self._long or num_own < 0:  # another one, or this one starts over
            self._long, self._num_before, self._num_passed, num_own = long, long.num_computed_tokens, 0, 0
        # Most is as many as make passed = share × own, with what it computes in this very step.
        num_due = (self._share * (num_own + num_left_tokens) - self._num_passed) / (1.0 + self._share)
        return max(0, min(int(num_due + _ROUNDING), num_left_tokens // 2))

    def passed(self, num_tokens: int) -> None:
        """So many tokens of the step went to others."""
        self._num_passed += num_tokens
