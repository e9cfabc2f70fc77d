"""A meter for tests: keeps what it is told."""

from __future__ import annotations


class NotedMeter:
    def __init__(self, noted: list[float]) -> None:
        self._noted = noted

    def advance(self) -> None:
        self._noted.append(1.0)

    def at(self, done: float, total: float | None = None) -> None:
        self._noted.append(done)
