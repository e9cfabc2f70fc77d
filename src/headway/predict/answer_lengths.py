"""A predictor and a traffic log at work: a guess before each answer, and what it really was afterwards.

Guesses only help. Whatever goes wrong with them is logged once and costs a guess or a line, never a request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from headway.config import PredictionConfig
from headway.predict.base import LengthPredictor, PromptView
from headway.predict.create import create_predictor
from headway.predict.traffic_log import USED_REASONS, TrafficLog

logger = logging.getLogger(__name__)


class AnswerLengths:
    """Not thread-safe, as its parts are not. Either part may be missing."""

    def __init__(self, predictor: LengthPredictor | None = None, log: TrafficLog | None = None) -> None:
        self._predictor = predictor
        self._log = log
        self._has_complained = False

    @classmethod
    def from_config(cls, config: PredictionConfig) -> AnswerLengths | None:
        """None if there is nothing to do. What cannot be read or written is refused here, at start."""
        if config.is_off:
            return None
        predictor = create_predictor(config.length_predictor)
        log = None if config.traffic_log is None else TrafficLog(config.traffic_log, config.traffic_log_content)
        return cls(predictor, log)

    @property
    def predicts(self) -> bool:
        """Whether there is a predictor."""
        return self._predictor is not None

    def predict(self, prompts: Sequence[PromptView]) -> list[float | None]:
        """The expected number of output tokens of each; None where there is no guess that could be used."""
        if self._predictor is None or not prompts:
            return [None] * len(prompts)
        try:
            guesses = self._predictor.predict(prompts)
            return [_usable(guess) for guess, _ in zip(guesses, prompts, strict=True)]
        except Exception:
            if len(prompts) > 1:  # perhaps it is only one of them
                return [guess for prompt in prompts for guess in self.predict([prompt])]
            self._complain("the length predictor failed; requests go on without a prediction")
            return [None]

    def note_end(
        self, prompt: PromptView, *, num_output_tokens: int, finish_reason: str, arrival_s: float | None
    ) -> None:
        """A completion has ended, in whichever way; `arrival_s` is in seconds since 1970."""
        if self._predictor is not None and finish_reason in USED_REASONS:
            try:
                self._predictor.observe(prompt, num_output_tokens)
            except Exception:
                self._complain("the length predictor failed to learn from an answer")
        if self._log is not None:
            try:
                self._log.write(
                    prompt, num_output_tokens=num_output_tokens, finish_reason=finish_reason, arrival_s=arrival_s
                )
            except Exception:
                self._complain("a line of the traffic log could not be made")

    def close(self) -> None:
        """Log nothing more. Can be called again."""
        if self._log is not None:
            self._log.close()

    def _complain(self, message: str) -> None:
        """With the exception at hand, the first time."""
        if not self._has_complained:
            self._has_complained = True
            logger.exception("%s; this is said only once", message)


def _usable(guess: float) -> float | None:
    return float(guess) if 0 < guess < math.inf else None
