"""The predictor that knows: for experiments, which ask how much there is to gain from a perfect guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headway.predict.base import PromptView
from headway.predict.errors import PredictorError


class OraclePredictor:
    """Looks the length up, by request id in a mapping or with a function of the prompt."""

    name = "oracle"

    def __init__(self, lengths: Mapping[str, float] | Callable[[PromptView], float]) -> None:
        self._length = lengths if callable(lengths) else _Lookup(lengths)

    @classmethod
    def of_fixed_lengths(cls) -> OraclePredictor:
        """For traffic that ignores the end-of-sequence token: every answer has `max_tokens` tokens."""
        return cls(_max_tokens)

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        return [float(self._length(prompt)) for prompt in prompts]

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        """There is nothing to learn."""


class _Lookup:
    def __init__(self, lengths: Mapping[str, float]) -> None:
        self._lengths = lengths

    def __call__(self, prompt: PromptView) -> float:
        if prompt.request_id is None or prompt.request_id not in self._lengths:
            raise PredictorError(f"The oracle was not told the length of request '{prompt.request_id}'.")
        return self._lengths[prompt.request_id]


def _max_tokens(prompt: PromptView) -> float:
    if prompt.max_tokens is None:
        raise PredictorError("The oracle takes max_tokens for the length, and this request has none.")
    return prompt.max_tokens
