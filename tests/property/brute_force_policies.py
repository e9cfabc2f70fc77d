"""The policies again, each as a few plain sentences: whoever is asked about is sorted anew, and nothing is remembered
but what tenants have been served.

Numbers that the policies' descriptions name are written out here once more; a change there has to be made here too.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tests.property.brute_force_entry import Entry, Step

if TYPE_CHECKING:
    from tests.property.brute_force import BruteForceScheduler


def generated(entry: Entry) -> int:
    """Tokens that it has beyond its prompt, also those that are only on their way."""
    return entry.tokens - len(entry.prompt)


def length(entry: Entry) -> float:
    """Of the whole answer, as predicted; else as long as it may become."""
    return entry.limit - len(entry.prompt) if entry.predicted is None else entry.predicted


def rest(entry: Entry) -> float:
    return max(1.0, length(entry) - generated(entry))


class Fcfs:
    can_starve = False
    keeps_order = True
    """Whether ranks stay as they are while requests wait."""

    def __init__(self, model: BruteForceScheduler) -> None:
        self.model = model

    def rank(self, entry: Entry) -> Any:
        return 0

    def line(self, waiting: Iterable[Entry]) -> list[Entry]:
        return sorted(waiting, key=lambda e: (self.rank(e), e.order, e.number))

    def victim(self, running: Sequence[Entry]) -> Entry:
        return running[-1]

    def displaced(self, entry: Entry, running: Sequence[Entry]) -> Entry | None:
        """Who goes first so that it can enter."""
        return None

    def promise(self, entry: Entry) -> float:
        return 0.0

    def pace(self, default: float) -> float:
        return default

    def limit(self) -> float:
        """The longest that a step may take."""
        return math.inf

    def chunk(self, step: Step, entry: Entry, offered: int) -> int:
        """What it takes of that."""
        return offered

    def arrives(self, entry: Entry) -> None:
        """Before it is in the line."""

    def served(self, entry: Entry, start: int, end: int) -> None:
        """Tokens from `start` to before `end` are computed."""


class Priority(Fcfs):
    def rank(self, entry: Entry) -> int:
        return entry.priority


class Sjf(Fcfs):
    can_starve = True

    def rank(self, entry: Entry) -> float:
        return length(entry)

    def victim(self, running: Sequence[Entry]) -> Entry:
        return sorted(running, key=lambda e: (rest(e), e.number))[-1]


class Srpt(Sjf):
    def rank(self, entry: Entry) -> float:
        return rest(entry)

    def displaced(self, entry: Entry, running: Sequence[Entry]) -> Entry | None:
        """A rest that is six times longer pays; 32 tokens that are computed again count as one that is generated."""
        victim = self.victim(running)
        return victim if rest(victim) > 6 * (rest(entry) + self.model.own_tokens(victim) / 32) else None


class Hrrn(Fcfs):
    keeps_order = False

    def line(self, waiting: Iterable[Entry]) -> list[Entry]:
        return sorted(waiting, key=lambda e: (self.rank(e), e.number))

    def rank(self, entry: Entry) -> float:
        """Lengths are rounded to the nearest power of the square root of 2."""
        halves = math.log2(max(1.0, length(entry))) * 2
        service = self.model.step_s * math.sqrt(2) ** min(range(100), key=lambda half: abs(half - halves))
        return -(1 + (self.model.now - entry.arrived) / service)


class Slo(Fcfs):
    can_starve = True
    keeps_order = False

    def begin_by(self, entry: Entry) -> float:
        """A step, and one for each 2048 tokens, before the first token is due."""
        assert entry.ttft is not None
        return entry.arrived + entry.ttft - (1 + entry.tokens / 2048) * self.model.step_s

    def rank(self, entry: Entry) -> tuple[int, float]:
        if entry.ttft is None:
            return (2, 0.0)
        is_late = self.begin_by(entry) < self.model.now
        return (1, entry.arrived) if is_late else (0, self.begin_by(entry))

    def victim(self, running: Sequence[Entry]) -> Entry:
        without = [e for e in running if e.ttft is None and e.tpot is None]
        return max(without or running, key=lambda e: e.number)

    def displaced(self, entry: Entry, running: Sequence[Entry]) -> Entry | None:
        """Half of its time has passed, it can still be in time, and the other has no target."""
        if entry.ttft is None or not entry.arrived + entry.ttft / 2 <= self.model.now <= self.begin_by(entry):
            return None
        victim = self.victim(running)
        return victim if victim.ttft is None and victim.tpot is None else None

    def promise(self, entry: Entry) -> float:
        return 0.0 if entry.ttft is None else entry.ttft

    def pace(self, default: float) -> float:
        targets = [e.tpot for e in self.model.in_batch() if e.tpot is not None]
        return min([*targets, default] if default else targets, default=0.0)


class Fair(Fcfs):
    keeps_order = False

    def __init__(self, model: BruteForceScheduler) -> None:
        super().__init__(model)
        self.had: defaultdict[str, float] = defaultdict(float)

    def rank(self, entry: Entry) -> float:
        return self.had[entry.tenant]

    def line(self, waiting: Iterable[Entry]) -> list[Entry]:
        """The first one of each tenant, who has had least first; then the second ones; and so on."""
        own = defaultdict(list)
        for entry in sorted(waiting, key=lambda e: e.number):
            own[entry.tenant].append(entry)
        lines = sorted(own.values(), key=lambda line: (self.rank(line[0]), line[0].number))
        return [entry for row in itertools.zip_longest(*lines) for entry in row if entry is not None]

    def victim(self, running: Sequence[Entry]) -> Entry:
        return sorted(running, key=lambda e: (self.rank(e), e.number))[-1]

    def present(self) -> list[Entry]:
        return [*self.model.waiting(), *self.model.in_batch()]

    def arrives(self, entry: Entry) -> None:
        """One who was away starts with what the next one has had."""
        is_there = entry.tenant in {other.tenant for other in self.present()}
        if self.model.waiting() and not is_there:
            least = min(self.rank(other) for other in self.model.waiting())
            self.had[entry.tenant] = max(self.had[entry.tenant], least)

    def limit(self) -> float:
        """1.3 times what it would be for any tenant in the batch, alone on a machine that is as much slower as there
        are tenants: its decodes, and of its prompts what the pace allows. Nothing, if no step takes so long."""
        pace, num_tenants = (
            self.model.pace,
            len({e.tenant for e in self.present()}),
        )
        token_s, longest = pace.step_time.per_token_s or 0.0, pace.longest_s
        limits = []
        for tenant in {e.tenant for e in self.model.in_batch()}:
            own = [e for e in self.present() if e.tenant == tenant]
            num_rows = sum(e.name in self.model.running for e in own)
            decode = num_tenants * pace.decode_s(num_rows)
            waiting = sum(e.tokens for e in own if e.name not in self.model.running)
            under_way = sum(e.remaining for e in own if e.name in self.model.running and e.remaining > 1)
            rest = num_tenants * (waiting + under_way) * token_s
            paced = max(self.model.pace.target_s, rest / 10)
            limits.append(1.3 * max(decode, min(decode + rest, paced)))
        if num_tenants == 1 or num_tenants * pace.decode_s(1) >= longest:
            return math.inf
        return min(limits, default=math.inf)

    def chunk(self, step: Step, entry: Entry, offered: int) -> int:
        """All but what the first in the line needs, if its tenant has had less and it could enter."""
        line = self.line(self.model.waiting())
        if not line or self.rank(line[0]) >= self.rank(entry) or not self.model.could_enter(step, line[0]):
            return offered
        return max(1, min(offered, self.model.left(step) - line[0].tokens))

    def served(self, entry: Entry, start: int, end: int) -> None:
        self.had[entry.tenant] += sum(1 if place < len(entry.prompt) else 2 for place in range(start, end))


class Mlfq(Fcfs):
    can_starve = True

    def rank(self, entry: Entry) -> int:
        """Six levels; 32 tokens on the first, twice as many on each after it."""
        had = generated(entry) + len(entry.prompt) // 256
        ends = list(itertools.accumulate(32 * 2**level for level in range(5)))
        return sum(had >= end for end in ends)

    def victim(self, running: Sequence[Entry]) -> Entry:
        return sorted(running, key=lambda e: (self.rank(e), e.number))[-1]

    def displaced(self, entry: Entry, running: Sequence[Entry]) -> Entry | None:
        lower = [other for other in running if self.rank(other) > self.rank(entry)]
        return self.victim(lower) if lower else None


class CacheAware(Fcfs):
    """The policy `prefix`. There are never so many waiting here that its window of 32 would matter."""

    keeps_order = False

    def line(self, waiting: Iterable[Entry]) -> list[Entry]:
        most_passes = max(1, self.model.config.max_head_skips)
        in_order = sorted(waiting, key=lambda e: (e.order, e.number))
        assert len(in_order) <= 32
        first = [e for e in in_order if e.passes >= most_passes]
        others = [e for e in in_order if e.passes < most_passes]
        return first + sorted(others, key=lambda e: -len(self.model.find(e)))

    def victim(self, running: Sequence[Entry]) -> Entry:
        return min(running[1:] or running, key=lambda e: (self.model.own_tokens(e), -e.number))


BRUTE_FORCE_POLICIES: dict[str, type[Fcfs]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "sjf": Sjf,
    "srpt": Srpt,
    "ltr": Sjf,
    "hrrn": Hrrn,
    "slo": Slo,
    "fair": Fair,
    "mlfq": Mlfq,
    "prefix": CacheAware,
}
