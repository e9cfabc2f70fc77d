"""Divides the time of steps between prompt tokens and output tokens, so that each can have its price.

    step            prompt tokens pay                        output tokens pay
    prompts only    all of it
    decodes only                                             all of it
    mixed           what it takes longer than its decodes    what its decodes alone would take
                    alone would

Most of a mixed step's decodes is the reading of the weights. They would be read without any prompt, so the prompt does
not pay for them. What the decodes alone would take is the engine's own estimate, from steps that only decode. The first
token of an answer comes from the last step of its prompt, and costs nothing here.
"""

from __future__ import annotations

from typing import Annotated

from headway.core.scheduler_output import SchedulerOutput
from headway.core.step_time import DecodePace
from headway.counters import Counter, Statistics


class TokenTimeStats(Statistics):
    """The seconds of steps, by the tokens that they were for."""

    prompt_s: Annotated[
        float, Counter("prompt_compute_seconds", "Seconds of steps that prompt tokens took, recomputed ones too.")
    ] = 0.0
    output_s: Annotated[float, Counter("generation_compute_seconds", "Seconds of steps that output tokens took.")] = 0.0

    @property
    def prompt_share(self) -> float | None:
        """The share of prompts in the time of all steps; `None` if there were none."""
        whole_s = self.prompt_s + self.output_s
        return self.prompt_s / whole_s if whole_s > 0 else None


class TokenTime:
    """Counts the seconds of steps for prompt tokens and for output tokens."""

    def __init__(self, pace: DecodePace) -> None:
        """`pace` says how long decodes alone take."""
        self.stats = TokenTimeStats()
        self._pace = pace

    def take(self, output: SchedulerOutput, duration_s: float) -> None:
        """Count a step that took this long."""
        scheduled = output.scheduled
        if output.num_scheduled_tokens == len(scheduled):  # nearly always
            self.stats.output_s += duration_s
            return
        num_decodes = sum([share.num_tokens == 1 + len(share.drafts) for share in scheduled])
        output_s = duration_s
        if num_decodes < len(scheduled):
            output_s = min(self._pace.decode_s(num_decodes), duration_s) if num_decodes else 0.0
        self.stats.output_s += output_s
        self.stats.prompt_s += duration_s - output_s
