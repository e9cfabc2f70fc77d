"""Several ways to serve the same work, in turns: on a machine with other work on it, one round alone says little.

For each way the fastest of its rounds counts, since others can only slow it down. How far single rounds were apart is
kept, and told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.lab.claims.context import Context
from headway.lab.claims.place import Run
from headway.lab.claims.words import times
from headway.lab.workload.requests import Work


@dataclass(frozen=True)
class Way:
    """Work that is there at once, and the options it is served with."""

    work: Work
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Turns:
    """The rounds of each way, in the order in which they were run."""

    rounds: Mapping[str, Sequence[Run]]

    @property
    def best(self) -> dict[str, Run]:
        """The fastest round of each."""
        return {name: min(runs, key=lambda run: run.duration_s) for name, runs in self.rounds.items()}

    def spread(self, name: str, base: str) -> str:
        """How far the gain in throughput of one way over another was apart in single rounds; empty with only one."""
        ratios = [own.output_tok_s / other.output_tok_s for own, other in zip(self.rounds[name], self.rounds[base])]
        if len(ratios) < 2:
            return ""
        return (
            f"Each way had {len(ratios)} rounds, in turns, of which the fastest counts; within single rounds the ratio "
            f"was {times(min(ratios))} to {times(max(ratios))}."
        )


def take_turns(context: Context, ways: Mapping[str, Way]) -> Turns:
    """Measure them: once in the simulator, where nothing disturbs, otherwise several times."""
    rounds: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(context.num_rounds):
        for name, way in ways.items():
            label = f"{name}, round {number + 1}" if context.num_rounds > 1 else name
            rounds[name].append(context.run(label, way.work, **way.options))
    return Turns(rounds)
