"""The longest that requests of a workload may be: what a trace or a distribution gives is clamped to it."""

from __future__ import annotations

from dataclasses import dataclass

from headway.lab.workload.options_table import OptionsTable

_KEYS = ("min_input", "max_input", "min_output", "max_output", "max_total")


@dataclass(frozen=True)
class Limits:
    """In tokens; None: no limit."""

    min_input: int = 1
    max_input: int | None = None
    min_output: int = 1
    max_output: int | None = None
    max_total: int | None = None
    """Prompt and answer together. The prompt gives way, once the answer has left it one token."""

    def output(self, length: int) -> int:
        """An answer of this length, clamped."""
        length = _clamped(length, self.min_output, self.max_output)
        return length if self.max_total is None else max(1, min(length, self.max_total - 1))

    def input(self, length: int, num_output_tokens: int) -> int:
        """A prompt before an answer that is clamped already."""
        length = _clamped(length, self.min_input, self.max_input)
        return length if self.max_total is None else max(1, min(length, self.max_total - num_output_tokens))

    def most_input(self, num_output_tokens: int) -> int | None:
        """The longest prompt before such an answer."""
        room = None if self.max_total is None else self.max_total - num_output_tokens
        return min((bound for bound in (self.max_input, room) if bound is not None), default=None)

    def cut(self, prompt: list[int], num_output_tokens: int) -> list[int]:
        """The prompt, without what does not fit at its end."""
        most = self.most_input(num_output_tokens)
        return prompt if most is None else prompt[: max(1, most)]


def _clamped(length: int, least: int, most: int | None) -> int:
    return max(least, length if most is None else min(length, most))


def read_limits(table: OptionsTable) -> Limits:
    """From the table `[limits]`."""
    table.only(*_KEYS)
    values = {key: table.whole(key, least=2 if key == "max_total" else 1) for key in _KEYS if key in table}
    for side in ("input", "output"):
        if values.get(f"max_{side}", values.get(f"min_{side}", 1)) < values.get(f"min_{side}", 1):
            table.fail(f"max_{side} must not be below min_{side}")
    return Limits(**values)
