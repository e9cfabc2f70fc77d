"""The interface: what is known of a request when it arrives, the predictor of its answer's length, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.errors import HeadwayError
from headway.installing import install_extra


class PredictorError(HeadwayError):
    """A predictor cannot be made, or cannot answer a question."""


class PredictorFileError(PredictorError):
    """A file is not a predictor, is damaged, or was written by another version."""


class TrafficLogError(HeadwayError, ValueError):
    """A traffic log cannot be read or written, or has too few records to learn from."""


class MissingLightGBMError(PredictorError):
    """The library that the learned ranker needs is not installed."""

    def __init__(self) -> None:
        super().__init__(f"The learned length predictor needs LightGBM: run '{install_extra('predict')}'.")


@dataclass(frozen=True, slots=True)
class PromptView:
    """The part of a request that a predictor may use. Creating one copies nothing."""

    prompt_token_ids: Sequence[int]
    max_tokens: int | None = None
    """The most tokens the answer can have; None: not known."""
    temperature: float = 1.0
    text: str | None = None
    """The prompt as text, template included, if it is available; tokens are not decoded for this."""
    user: str | None = None
    request_id: str | None = None


class LengthPredictor(Protocol):
    """Predicts how many tokens answers will have. Not thread-safe: one engine, or one thread of a server, owns it."""

    @property
    def name(self) -> str:
        """The name for logs and metrics."""

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        """The expected number of output tokens of each prompt, from 1 to its `max_tokens`. Does not change the
        predictor."""

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        """Learn from a request that ended by itself or at its `max_tokens`. Predictors that do not learn do nothing."""
