"""The graceful stop of a server, which loses no request.

    serving ──signal──► lame duck ───────────► refusing ──────────────► over
                        /health says 503,      new requests get 503;    nothing runs any more, or
                        requests are served    what runs goes on        the drain timeout is over

A load balancer polls /health, so it still sends requests for a while after the signal. These are served during the
lame-duck phase. A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from headway.server.api.api_errors import ApiError, unavailable

SHUTTING_DOWN = "the server is shutting down"
SHUTTING_DOWN_CODE = "server_shutting_down"


def shutting_down() -> ApiError:
    """Return the error of a request that is refused or ended because the server stops."""
    return unavailable("The server is shutting down; please retry.", code=SHUTTING_DOWN_CODE)


class Drain:
    """The phases of a graceful stop. Belongs to one event loop."""

    def __init__(self, *, lame_duck_s: float, timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._lame_duck_s = min(lame_duck_s, timeout_s)
        self._timeout_s = timeout_s
        self._now = now
        self._until_s = 0.0
        self._asked = asyncio.Event()
        self._forced = asyncio.Event()
        self.is_refusing = False
        """Whether new requests are refused."""

    @property
    def is_asked(self) -> bool:
        """Whether the server has been asked to stop."""
        return self._asked.is_set()

    @property
    def is_forced(self) -> bool:
        """Whether the server has been asked a second time, and waits for nothing more."""
        return self._forced.is_set()

    @property
    def left_s(self) -> float:
        """How long running requests may still continue. Negative after the drain timeout."""
        return self._until_s - self._now()

    def ask(self, *, lame_duck: bool = True) -> None:
        """Ask the server to stop, after a lame-duck phase or at once. The second call forces the end."""
        if self.is_asked:
            self.is_refusing = True
            self._forced.set()
            return
        self._until_s = self._now() + self._timeout_s
        if not lame_duck:
            self._lame_duck_s = 0.0
            self.is_refusing = True
        self._asked.set()

    async def unless_asked(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Run `work`, but cancel it as soon as the server is asked to stop. Returns whether it was completed."""
        if self.is_asked:
            return False
        doing, asking = asyncio.ensure_future(work()), asyncio.ensure_future(self._asked.wait())
        both: set[asyncio.Future[Any]] = {doing, asking}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
                return True
            return False
        finally:
            asking.cancel()
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def end_lame_duck(self) -> None:
        """Wait for the end of the lame-duck phase, then refuse new requests."""
        left_s = self._until_s - self._timeout_s + self._lame_duck_s - self._now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._forced.wait()
        self.is_refusing = True

    async def unless_forced(self, work: asyncio.Future[None]) -> None:
        """Wait for `work`, but no longer than until the second signal."""
        forcing = asyncio.ensure_future(self._forced.wait())
        both: set[asyncio.Future[Any]] = {work, forcing}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        forcing.cancel()

    async def until_forced(self) -> None:
        """Wait for the second signal."""
        await self._forced.wait()
