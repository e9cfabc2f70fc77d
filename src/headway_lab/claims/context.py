"""The context of a claim: a testbed, sizes that fit it, data, runs of several variants in turn, searches for a rate.

On a machine with other work, a single round says little. So variants of serving the same work take turns. The fastest
round of each counts, since other work can only slow it down, and the spread of single rounds is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from headway.errors import HeadwayError
from headway.progress import Meter
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.claims.claim import EngineUse, Outcome, Where, times
from headway_lab.claims.run import Run
from headway_lab.claims.run_prices import RunTable
from headway_lab.claims.testbed import Testbed
from headway_lab.workload.bench_requests import Work

_T = TypeVar("_T")
Bar = Callable[[int, str], AbstractContextManager[Meter | None]]
"""(number of requests, their title) → a progress bar"""

_CPU_QUICK_SHARE = 8
_CPU_SHARE = 4

NORMALISED = "median_normalised_ms"
"""Median over requests of the time from arrival to the last token, divided by the number of tokens."""


class Infeasible(HeadwayError):
    """A claim cannot be measured on this testbed. The message is a clause that says why, and what to do about it."""


def no_bar(num_requests: int, title: str) -> AbstractContextManager[Meter | None]:
    """Show nothing."""
    return nullcontext()


@dataclass
class Context:
    """The surroundings of one claim; `shared` has what several claims measure."""

    testbed: Testbed
    is_quick: bool = False
    data_dir: Path | None = None
    bar: Bar = no_bar
    say: Callable[[str], object] = lambda text: None
    shared: dict[Any, Any] = field(default_factory=dict)
    prices: RunTable = field(default_factory=RunTable)
    """What the tokens of each run cost, if the price of a device is given."""

    @property
    def where(self) -> Where:
        return self.testbed.where

    def sized(self, *, tiny: int, short: int, full: int, gpu: int | None = None) -> int:
        """Choose a number of requests. tiny: a quick run on a CPU. short: any other quick run, and a full one on a CPU.
        gpu: a full run on a real GPU, where it takes long (default: `full`). full: any other full run."""
        if self.testbed.is_cpu:
            return tiny if self.is_quick else short
        if self.is_quick:
            return short
        return gpu if gpu is not None and self.where == "engine" else full

    @property
    def num_rounds(self) -> int:
        """How many times the same is measured, if other work on the machine could disturb it."""
        return 3 if self.where == "engine" and self.testbed.is_cpu else 1

    @property
    def divisor(self) -> int:
        """Lengths and memory are divided by this: a CPU would take hours for the published ones."""
        if not self.testbed.is_cpu:
            return 1
        return _CPU_QUICK_SHARE if self.is_quick else _CPU_SHARE

    @property
    def divided(self) -> str:
        """A remark that lengths and memory were divided; empty if they were not."""
        return f" (published lengths and memory divided by {self.divisor})" if self.divisor > 1 else ""

    def run(self, label: str, work: Work, **options: Any) -> Run:
        """Serve the work; `label` is shown to people meanwhile."""
        self.say(f"{label}: {len(work):,} requests")
        with self.bar(len(work), label) as progress:
            run = self.testbed.run(work, progress=progress, **options)
        self.prices.note(label, run, self.testbed.num_devices)
        return run

    def once(self, key: str, make: Callable[[], _T]) -> _T:
        """What any claim has made before under this key on this testbed; it is made now if there is none."""
        both = (id(self.testbed), key)
        if both not in self.shared:
            self.shared[both] = make()
        return self.shared[both]

    def data_file(self, name: str) -> Path | None:
        """A file of real data, if it exists."""
        if self.data_dir is None:
            return None
        path = self.data_dir / name
        return path if path.is_file() else None


@dataclass(frozen=True)
class Variant:
    """Requests that are all there at once, and the options with which they are served."""

    work: Work
    options: Mapping[str, Any]


@dataclass(frozen=True)
class AlternatingRuns:
    """The rounds of each variant, in the order in which they were run."""

    rounds: Mapping[str, Sequence[Run]]

    @property
    def best(self) -> dict[str, Run]:
        """The fastest round of each variant."""
        return {name: min(runs, key=lambda run: run.duration_s) for name, runs in self.rounds.items()}

    def spread(self, name: str, base: str) -> str:
        """The range of the gain in throughput of one variant over another in single rounds; empty if there was only
        one."""
        return _spread_of(
            [own.output_tok_s / other.output_tok_s for own, other in zip(self.rounds[name], self.rounds[base])]
        )

    def spread_of_times(self, name: str, base: str) -> str:
        """The same for variants of one piece of work, of which one may compute more tokens than were asked for."""
        return _spread_of(
            [other.duration_s / own.duration_s for own, other in zip(self.rounds[name], self.rounds[base])]
        )


def _spread_of(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return ""
    return (
        f"Each way had {len(ratios)} rounds, in turns, of which the fastest counts; within single rounds the ratio was "
        f"{times(min(ratios))} to {times(max(ratios))}."
    )


def run_alternating(context: Context, ways: Mapping[str, Variant]) -> AlternatingRuns:
    """Measure the variants: once in the simulator, where nothing disturbs, otherwise several times in turn."""
    rounds: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(context.num_rounds):
        for name, way in ways.items():
            label = f"{name}, round {number + 1}" if context.num_rounds > 1 else name
            rounds[name].append(context.run(label, way.work, **way.options))
    return AlternatingRuns(rounds)


@dataclass(frozen=True)
class NormalisedMetrics(OnlineMetrics):
    """Metrics with the latency by which the Orca paper compares."""

    normalised_ms: float = 0.0

    @classmethod
    def of_run(cls, run: Run) -> NormalisedMetrics:
        usual = {item.name: getattr(run.metrics, item.name) for item in fields(OnlineMetrics)}
        return cls(**usual, normalised_ms=1e3 * statistics.median(run.per_token_s))

    def as_json(self) -> dict[str, float | None]:
        """The usual keys and that latency."""
        return {**super().as_json(), NORMALISED: self.normalised_ms}


@dataclass(frozen=True)
class Span:
    """For how long requests arrive at each rate that is tried, and how many there are at least and at most."""

    seconds: float
    least: int
    most: int

    def count(self, rate: float) -> int:
        """The number of requests at this rate."""
        return int(min(max(rate * self.seconds, self.least), self.most))


@dataclass(frozen=True)
class Claim:
    """A published claim, with the way to measure it."""

    id: str
    title: str
    published: str
    """What was published, with its number."""
    source: str
    workload: str
    """The published workload."""
    method: str
    """How it is measured here."""
    measure: Callable[[Context], Outcome]
    engine: EngineUse = "asked"
