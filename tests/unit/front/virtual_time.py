"""An event loop in which nobody waits: when nothing can be done, the time of the next timer comes at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterator

import pytest


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For one process that talks to nobody but itself, over sockets or not."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_ImpatientSelector(self))

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Time passes in which this loop does nothing."""
        self._now_s += seconds


class _ImpatientSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("nothing will ever happen")
        if not found and timeout:
            self._loop.advance(timeout)
        return found


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """In place of the runner of `tests/unit/conftest.py`, for all tests of a module that imports it."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as made:
        yield made


async def settle() -> None:
    """Let everything happen that can happen without time."""
    await asyncio.sleep(1e-6)
