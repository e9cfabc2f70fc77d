"""Reasoning formats: the pair of markers with which a model encloses its reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway.structured.grammars import SPACES


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around what the model thinks before it answers."""

    name: str
    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def is_open_after(self, prompt: str, *, in_text: bool = False) -> bool:
        """Whether a prompt ends with the opening marker, or `in_text`, with what the model has thought so far: the
        answer then begins in the reasoning."""
        if in_text:
            return prompt.rfind(self.opening) > prompt.rfind(self.closing)
        return prompt.rstrip(SPACES).endswith(self.opening)


_REASONING = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType({one.name: one for one in _REASONING})


def reasoning_format_for(chat_template: str | None) -> ReasoningFormat | None:
    """The reasoning that a model's chat template shows, if any."""
    template = chat_template or ""
    # Some templates only cut the reasoning off earlier answers: they name the closing marker alone.
    return next((one for one in _REASONING if one.closing in template), None)
