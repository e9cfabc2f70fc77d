"""Statistics: each number is declared once with its kind, as a field of the record of the class that counts it.

    Counter   only grows: it continues when its engine is restarted
    Gauge     the present state: it is lost with its engine
    neither   of the last step alone, or learnt from steps: it is not added up, and no metric

The declarations determine everything done with the numbers: sums over engines, restarts, `/metrics` and the feed of the
live page. To add a number, add a field to its owner's record and count in it: docs/adding_a_counter.md shows one.
"""

from __future__ import annotations

import functools
import itertools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
from msgspec import field as field


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of a number, besides its field's name and type."""

    metric: str = ""
    """Its name in `/metrics`; empty if it is not a metric."""
    help: str = ""
    by_replica: bool = False
    """Whether `/metrics` shows it for each replica too."""


@dataclass(frozen=True, slots=True)
class Counter(Declared):
    of_requests: bool = False
    """Whether it counts clients' requests. Such a counter must not count a prompt twice that one engine computes for
    another."""
    label: str = ""
    """For a list of counters: the name of the label that distinguishes them."""


@dataclass(frozen=True, slots=True)
class Gauge(Declared):
    pass


Number = float | list[int]


class Statistics(msgspec.Struct, array_like=True, gc=False):
    """A record of numbers. Fields may themselves be such records."""

    def add(self, other: Self) -> None:
        """Add another engine's counters and gauges."""
        self._add(other, Counter | Gauge)

    def go_on_from(self, before: Self) -> None:
        """Add the counters of the engine that this one replaces."""
        self._add(before, Counter)

    def forget_state(self) -> None:
        """Reset everything but the counters, because the engine is gone."""
        fresh = type(self)()
        for name, declared in _fields(type(self)):
            if declared is Statistics:
                getattr(self, name).forget_state()
            elif not isinstance(declared, Counter):
                setattr(self, name, getattr(fresh, name))

    def without_requests(self) -> Self:
        """A copy in which the counters of clients' requests are 0."""
        copy = type(self)()
        copy.add(self)
        for owner, name, declared in copy._numbers():
            if isinstance(declared, Counter) and declared.of_requests:
                setattr(owner, name, 0)
        return copy

    def metrics(self) -> Iterator[tuple[Counter | Gauge, Number]]:
        """Yield each number that `/metrics` shows, with its declaration."""
        for owner, name, declared in self._numbers():
            if declared.metric:
                yield declared, getattr(owner, name)

    def as_dict(self) -> dict[str, Number]:
        """All counters and gauges by name, without their owners."""
        return {name: getattr(owner, name) for owner, name, _ in self._numbers()}

    def _numbers(self) -> Iterator[tuple[Statistics, str, Counter | Gauge]]:
        for name, declared in _fields(type(self)):
            if declared is Statistics:
                yield from getattr(self, name)._numbers()
            elif isinstance(declared, Counter | Gauge):
                yield self, name, declared

    def _add(self, other: Self, kinds: Any) -> None:
        for name, declared in _fields(type(self)):
            if declared is Statistics:
                getattr(self, name)._add(getattr(other, name), kinds)
            elif isinstance(declared, kinds):
                setattr(self, name, _sum(getattr(self, name), getattr(other, name)))


@functools.cache
def _fields(record: type[Statistics]) -> list[tuple[str, Counter | Gauge | type[Statistics] | None]]:
    """Field names and kinds: a declared number, a record of numbers, or neither."""
    fields: list[tuple[str, Counter | Gauge | type[Statistics] | None]] = []
    for name, kind in typing.get_type_hints(record, include_extras=True).items():
        if isinstance(kind, type) and issubclass(kind, Statistics):
            fields.append((name, Statistics))
        elif typing.get_origin(kind) is Annotated:
            fields.append((name, kind.__metadata__[0]))
        else:
            fields.append((name, None))
    return fields


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return one + other
