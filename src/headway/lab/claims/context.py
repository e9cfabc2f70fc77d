"""What a claim is given to measure with: a place, how large the work may be, data, and somebody to tell how it goes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headway.lab.claims.place import Place, Run
from headway.lab.claims.where import Where
from headway.lab.workload.requests import Work

if TYPE_CHECKING:
    from headway.cli.progress import Meter

_T = TypeVar("_T")
Bar = Callable[[int, str], AbstractContextManager[Meter | None]]
"""(how many requests, what they are) → something that shows how far they are"""

_CPU_QUICK_SHARE = 8
_CPU_SHARE = 4


def no_bar(num_requests: int, title: str) -> AbstractContextManager[Meter | None]:
    """Nobody watches."""
    return nullcontext()


@dataclass
class Context:
    """For one claim; what several claims measure is kept in `shared`."""

    place: Place
    is_quick: bool = False
    data_dir: Path | None = None
    bar: Bar = no_bar
    say: Callable[[str], object] = lambda text: None
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def where(self) -> Where:
        return self.place.where

    def sized(self, *, tiny: int, short: int, full: int, gpu: int | None = None) -> int:
        """A number of requests. tiny: a quick run on a CPU. short: any other quick run, and a CPU that has time. gpu:
        on a real one, where a long run takes its time; otherwise as full."""
        if self.place.is_cpu:
            return tiny if self.is_quick else short
        if self.is_quick:
            return short
        return gpu if gpu is not None and self.where == "engine" else full

    @property
    def num_rounds(self) -> int:
        """How often the same is measured, where what else a machine does could disturb it."""
        return 3 if self.where == "engine" and self.place.is_cpu else 1

    @property
    def divisor(self) -> int:
        """Lengths and memory are divided by this: a CPU would take hours for the published ones."""
        if not self.place.is_cpu:
            return 1
        return _CPU_QUICK_SHARE if self.is_quick else _CPU_SHARE

    @property
    def divided(self) -> str:
        """Says so."""
        return f" (published lengths and memory divided by {self.divisor})" if self.divisor > 1 else ""

    def run(self, label: str, work: Work, **options: Any) -> Run:
        """Serve the work; `label` is what people read meanwhile."""
        self.say(f"{label}: {len(work):,} requests")
        with self.bar(len(work), label) as progress:
            return self.place.run(work, progress=progress, **options)

    def once(self, key: str, make: Callable[[], _T]) -> _T:
        """What was made before under this key, in this place, by whichever claim."""
        place = (id(self.place), key)
        if place not in self.shared:
            self.shared[place] = make()
        return self.shared[place]

    def data_file(self, name: str) -> Path | None:
        """A file of real data, if it is there."""
        if self.data_dir is None:
            return None
        path = self.data_dir / name
        return path if path.is_file() else None
