"""What guesses add to a step, beside the rows that verify them, and how often they are right.

A guess that is verified is a row of the step, and the cost model has rows. What it does not have is the making of
guesses: a draft model computes them one after the other, so a step with guesses waits for as many passes of that model
as its longest guess has tokens, and each pass computes a token of each request that guesses.

    seconds = pass × longest guess + token × guessed tokens

Both are fitted to what is left of measured steps with guesses when the cost model has had its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headway.core import SchedulerOutput

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine


class DraftedStep(NamedTuple):
    """A measured step with guesses."""

    longest: int
    """Tokens of its longest guess."""
    num_tokens: int
    """Guessed tokens of all its requests."""
    left_s: float
    """Seconds that it took beyond what the cost model expects of its rows."""


@dataclass(frozen=True)
class Drafting:
    """Seconds for each pass and each guessed token, and the chance that a guess is right if those before it were."""

    acceptance: float = 0.0
    pass_s: float = 0.0
    token_s: float = 0.0

    @property
    def is_free(self) -> bool:
        """Whether guesses add nothing but rows."""
        return not self.pass_s and not self.token_s

    def seconds(self, output: SchedulerOutput) -> float:
        """Seconds that the guesses of a planned step add."""
        return self.of_drafts(*drafts_of(output))

    def of_drafts(self, longest: int, num_tokens: int) -> float:
        """Seconds that guesses of `num_tokens` tokens together add."""
        return self.pass_s * longest + self.token_s * num_tokens

    def scaled(self, factor: float) -> Drafting:
        """A machine on which everything takes `factor` times as long."""
        return Drafting(self.acceptance, factor * self.pass_s, factor * self.token_s)

    @staticmethod
    def fit(steps: Sequence[DraftedStep], *, acceptance: float = 0.0) -> Drafting:
        """Fit to measured steps. Guesses of steps too few for a fit are free."""
        if len(steps) < 8:
            return Drafting(acceptance)
        from headway_lab.sim.cost_model import non_negative_least_squares

        terms = np.array([[step.longest, step.num_tokens] for step in steps], dtype=np.float64)
        left_s = np.array([step.left_s for step in steps])
        weights = np.ones(len(steps))
        pass_s = token_s = 0.0
        for _ in range(10):  # absolute deviations, so that a few slow steps do not bend the line
            pass_s, token_s = non_negative_least_squares(terms * weights[:, None], left_s * weights)
            deviations = np.abs(left_s - terms @ np.array([pass_s, token_s]))
            weights = 1.0 / np.sqrt(np.maximum(deviations, 0.05 * float(np.median(np.abs(left_s))) + 1e-9))
        return Drafting(acceptance, float(pass_s), float(token_s))

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> Drafting:
        """Read what `as_json` made; `ValueError` or `TypeError` for anything else."""
        drafting = Drafting(**{name: float(value) for name, value in document.items()})
        if min(asdict(drafting).values()) < 0.0 or drafting.acceptance > 1.0:
            raise ValueError("what guesses cost is negative, or more than all of them are right")
        return drafting


def acceptance_of(num_drafts: int, num_tokens: int, num_right: int) -> float:
    """The chance that a guessed token is right if those before it were. There were `num_drafts` guesses of `num_tokens`
    tokens together, of which the first ones of each, `num_right` in all, were right. Guesses count as equally long."""
    if not num_drafts:
        return 0.0
    longest, right = num_tokens / num_drafts, num_right / num_drafts
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        whole = int(longest)
        expected = sum(chance**place for place in range(1, whole + 1)) + (longest - whole) * chance ** (whole + 1)
        low, high = (chance, high) if expected < right else (low, chance)
    return (low + high) / 2


def guess_counts(engine: LLMEngine) -> tuple[int, int, int]:
    """Guesses that the engine has verified, their tokens, and how many of these were right."""
    speculation = engine.core.scheduler.speculation
    if speculation is None:
        return 0, 0, 0
    stats = speculation.stats
    return stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens


def drafts_of(output: SchedulerOutput) -> tuple[int, int]:
    """(tokens of the longest guess, guessed tokens) of a planned step."""
    if output.num_scheduled_tokens == len(output.scheduled):  # nearly always
        return 0, 0
    counts = [len(share.drafts) for share in output.scheduled]
    return max(counts, default=0), sum(counts)
