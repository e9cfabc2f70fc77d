"""What prompts are made of. Each kind of content is a file of its own; this is what they have in common."""

from __future__ import annotations

from typing import Protocol

from headway.lab.workload.drawing import Draft, Drawing
from headway.lab.workload.trace_rows import Trace


class Content(Protocol):
    """A kind of content."""

    @property
    def has_text(self) -> bool:
        """Whether it takes a tokenizer to draw it."""

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        """So many requests."""

    def num_available(self, trace: Trace | None) -> int | None:
        """How many requests there are before something has to come again; None where there is no end."""


def rows_in(trace: Trace | None) -> int | None:
    """How many requests a trace has, if there is one."""
    return None if trace is None else len(trace.read())
