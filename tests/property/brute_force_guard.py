"""The guard against starvation again: a list of all arrivals, from which one is struck out whenever somebody enters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.property.brute_force_entry import Entry


class BruteForceGuard:
    """Knows who would not have entered yet in order of arrival, and who has been lifted."""

    def __init__(self, grace: float, stretch: float, promise: Callable[[Entry], float]) -> None:
        self.grace, self.stretch, self.promise = grace, stretch, promise
        self.in_order: list[Entry] = []
        self.lifted: list[Entry] = []
        self.num_lifted = 0

    def line(self, behind: list[Entry]) -> list[Entry]:
        """The lifted ones, and then the others in their own order."""
        return self.lifted + [entry for entry in behind if entry not in self.lifted]

    def arrives(self, entry: Entry) -> None:
        self.in_order.append(entry)

    def enters(self, entry: Entry, now: float, waiting: Iterable[Entry]) -> None:
        """`waiting`: all others that still do."""
        self.forget(entry)
        if entry.preemptions:
            return
        first = self.in_order.pop(0)
        if first in waiting and not first.stay:
            would_have_waited = now - first.arrived
            allowed = max(self.stretch * would_have_waited, self.promise(first))
            first.lift_at = first.arrived + allowed + self.grace

    def comes_back(self, entry: Entry, now: float) -> None:
        entry.lift_at = now + (now - entry.arrived) + self.grace

    def ends(self, entry: Entry) -> None:
        """While it waited."""
        self.forget(entry)
        if entry in self.in_order and not entry.stay:
            self.in_order.remove(entry)

    def forget(self, entry: Entry) -> None:
        entry.lift_at = None
        if entry in self.lifted:
            self.lifted.remove(entry)

    def advance(self, now: float, waiting: Iterable[Entry]) -> None:
        due = [e for e in waiting if e.lift_at is not None and e.lift_at <= now and e not in self.lifted]
        self.lifted += sorted(due, key=lambda e: (e.lift_at, e.number))
        self.num_lifted += len(due)
