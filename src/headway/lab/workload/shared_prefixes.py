"""A few long beginnings that many prompts share, each followed by something of the request's own.

prompt = one of k prefixes + a tail of the input's length
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from headway.lab.workload.content import rows_in
from headway.lab.workload.distributions import Distribution, draw_length, read_distribution
from headway.lab.workload.drawing import Draft, Drawing
from headway.lab.workload.options_table import OptionsTable
from headway.lab.workload.trace_rows import Trace


@dataclass(frozen=True)
class SharedPrefixes:
    weights: tuple[float, ...]
    """How often each prefix comes, among all weights."""
    prefix_tokens: Distribution

    has_text: ClassVar[bool] = False

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rng = drawing.rng("prefixes")
        prefixes = [drawing.ids(rng, draw_length(self.prefix_tokens, rng)) for _ in self.weights]
        choosing, writing = drawing.rng("prefix choice"), drawing.rng("ids")
        drafts = []
        for size in drawing.sizes(count):
            prefix = choosing.choices(prefixes, self.weights)[0]
            num_out = drawing.limits.output(size.num_output_tokens)
            prompt = prefix + drawing.ids(writing, size.num_input_tokens)
            drafts.append(Draft(drawing.limits.cut(prompt, num_out), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return rows_in(trace)


def read_shared_prefixes(table: OptionsTable, folders: tuple[Path, ...]) -> SharedPrefixes:
    """From the table `[content]`."""
    table.only("kind", "prefixes", "prefix_tokens", "weights", "zipf")
    count = table.whole("prefixes")
    if "weights" in table and "zipf" in table:
        table.fail("either 'weights' or 'zipf' says how often each prefix comes, not both")
    if "weights" in table:
        weights = table.weights("weights", count)
    else:
        exponent = table.number("zipf", 0.0, is_above=False)
        weights = tuple(place**-exponent for place in range(1, count + 1))
    if "prefix_tokens" not in table:
        table.fail("'prefix_tokens' is needed")
    length = read_distribution(table.raw("prefix_tokens"), "content: prefix_tokens: ", folders=folders)
    return SharedPrefixes(weights, length)
