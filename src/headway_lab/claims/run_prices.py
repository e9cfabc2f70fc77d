"""What the tokens of a claim's runs cost: a row for each kind of run, of its cheapest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway_lab.bench.pricing import Pricing
from headway_lab.claims.run import Run

INPUT, OUTPUT, ALL_IN = "price/M input tokens", "price/M output tokens", "all in"


@dataclass
class RunTable:
    """Label of a run → title → price."""

    per_hour: float | None = None
    """The price of a device; `None`: nothing is priced."""
    rows: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def note(self, label: str, run: Run, num_devices: int) -> None:
        """Keep the prices of a run, unless one of the same label was cheaper."""
        if self.per_hour is None:
            return
        metrics = run.metrics
        found = Pricing(self.per_hour, num_devices, run.prompt_share).of(
            run.duration_s, num_input_tokens=metrics.num_input_tokens, num_output_tokens=metrics.num_output_tokens
        )
        prices = {INPUT: found.tokens.input, OUTPUT: found.tokens.output, ALL_IN: found.tokens.all_in}
        known = {title: price for title, price in prices.items() if price is not None}
        before = self.rows.get(label)
        if ALL_IN in known and (before is None or known[ALL_IN] < before[ALL_IN]):
            self.rows[label] = known
