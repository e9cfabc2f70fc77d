"""What guesses add to a step, beside the rows that verify them, and how often they are right.

A guess that is verified is a row of the step, and the cost model has rows. It lacks two things. A guess is a row of a
request that is in the step anyway, so it may cost less than a row of another request, or more. And a draft model
computes guesses one after the other, so a step waits for as many passes of that model as its longest guess has tokens.

    seconds = pass × longest guess + token × guessed tokens         pass: of a draft model only; token: may be negative

What a token costs differs between steps that only decode and those with chunks, as it does for rows. All are fitted to
measured steps together with the terms of the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headway.core import SchedulerOutput
from headway.core.step_work import StepWork
from headway_lab.sim.cost_model import fit_beside

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine


class Drafts(NamedTuple):
    """The guesses of a step."""

    longest: int = 0
    """Tokens of the longest guess."""
    num_tokens: int = 0
    """Guessed tokens of all requests."""
    has_chunks: bool = False
    """Whether the step also computes chunks of prompts."""

    @staticmethod
    def of(output: SchedulerOutput) -> Drafts:
        """The guesses of a planned step."""
        num_rows = len(output.scheduled)
        if output.num_scheduled_tokens == num_rows:  # nearly always
            return NO_DRAFTS
        counts = [len(share.drafts) for share in output.scheduled]
        num_tokens = sum(counts)
        return Drafts(max(counts, default=0), num_tokens, output.num_scheduled_tokens > num_rows + num_tokens)


NO_DRAFTS = Drafts()


class DraftedStep(NamedTuple):
    """A measured step, with or without guesses."""

    work: StepWork
    seconds: float
    drafts: Drafts


@dataclass(frozen=True)
class Drafting:
    """Seconds for each pass and each guessed token, and the chance that a guess is right if those before it were."""

    acceptance: float = 0.0
    pass_s: float = 0.0
    token_s: float = 0.0
    chunked_token_s: float = 0.0
    """In steps with chunks."""

    @property
    def is_free(self) -> bool:
        """Whether guesses add nothing but rows."""
        return not (self.pass_s or self.token_s or self.chunked_token_s)

    def seconds(self, drafts: Drafts) -> float:
        """Seconds that the guesses of a step add."""
        token_s = self.chunked_token_s if drafts.has_chunks else self.token_s
        return self.pass_s * drafts.longest + token_s * drafts.num_tokens

    def __str__(self) -> str:
        each = f"{1e3 * self.token_s:+.3f} ms for each beside its row, {1e3 * self.chunked_token_s:+.3f} beside chunks"
        passes = f"{1e3 * self.pass_s:.2f} ms for a pass of the draft model, " if self.pass_s else ""
        return f"{100 * self.acceptance:.0f}% right, {passes}{each}".replace("-", "−")

    def scaled(self, factor: float) -> Drafting:
        """A machine on which everything takes `factor` times as long."""
        times = {name: factor * getattr(self, name) for name in ("pass_s", "token_s", "chunked_token_s")}
        return Drafting(self.acceptance, **times)

    @staticmethod
    def fit(steps: Sequence[DraftedStep], *, has_model: bool) -> Drafting:
        """Fit to measured steps, together with what the cost model has. Guesses of steps too few for a fit are nothing
        but rows."""
        if sum(step.drafts.num_tokens > 0 for step in steps) < 8:
            return Drafting()
        # No term is negative, so there is one for what a token costs more than a row, and one for what it costs less.
        columns = []
        for _, _, (longest, num_tokens, has_chunks) in steps:
            plain, chunked = (0, num_tokens) if has_chunks else (num_tokens, 0)
            columns.append([longest * has_model, plain, -plain, chunked, -chunked])
        found = fit_beside([(step.work, step.seconds) for step in steps], np.array(columns, dtype=np.float64))
        return Drafting(pass_s=found[0], token_s=found[1] - found[2], chunked_token_s=found[3] - found[4])

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> Drafting:
        """Read what `as_json` made; `ValueError` or `TypeError` for anything else."""
        drafting = Drafting(**{name: float(value) for name, value in document.items()})
        if not all(map(math.isfinite, asdict(drafting).values())) or drafting.pass_s < 0.0:
            raise ValueError("what guesses cost is no number of seconds")
        if not 0.0 <= drafting.acceptance <= 1.0:
            raise ValueError(f"{drafting.acceptance} of the guesses are right, which is no share")
        return drafting


def acceptance_of(num_right: int, num_wrong: int) -> float:
    """The chance that a guessed token is right if those before it were. `num_right`: tokens that were; `num_wrong`:
    first tokens of a guess that were not. Tokens after a wrong one say nothing, and neither does the end of a guess."""
    return num_right / (num_right + num_wrong) if num_right else 0.0


def guess_counts(engine: LLMEngine) -> tuple[int, int]:
    """Tokens of verified guesses that were right, and guesses of which one was wrong."""
    speculation = engine.core.scheduler.speculation
    if speculation is None:
        return 0, 0
    return speculation.stats.num_accepted_tokens, speculation.stats.num_wrong_drafts
