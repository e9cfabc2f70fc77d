"""Prompts of random token ids: nothing is shared, nothing means anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headway.lab.workload.content import rows_in
from headway.lab.workload.drawing import Draft, Drawing
from headway.lab.workload.trace_rows import Trace


@dataclass(frozen=True)
class RandomContent:
    has_text: ClassVar[bool] = False

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rng = drawing.rng("ids")
        drafts = []
        for size in drawing.sizes(count):
            num_out = drawing.limits.output(size.num_output_tokens)
            num_in = drawing.limits.input(size.num_input_tokens, num_out)
            drafts.append(Draft(drawing.ids(rng, num_in), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return rows_in(trace)
