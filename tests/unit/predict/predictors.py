"""Predictors that are written down, for tests of those who use one."""

from __future__ import annotations

from collections.abc import Sequence

from headway.predict import PromptView


class Predictor:
    """By the prompt's first token. Keeps what it was asked and told."""

    name = "scripted"

    def __init__(self) -> None:
        self.asked: list[list[PromptView]] = []
        self.told: list[tuple[str | None, int]] = []

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        self.asked.append(list(prompts))
        return [float(prompt.prompt_token_ids[0]) for prompt in prompts]

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        self.told.append((prompt.request_id, num_output_tokens))


class BrokenPredictor:
    name = "broken"

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        raise RuntimeError("no idea")

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        raise RuntimeError("no idea either")
