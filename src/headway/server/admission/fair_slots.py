"""A limited number of slots that clients take in turn, however many jobs one of them has."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Slots for the jobs of one event loop, given out fairly among clients.

    A client with many queued jobs only delays itself: a free slot goes to the client whose last turn was longest ago.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The queued jobs of each client. The client whose turn is next comes first."""

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it inside the block."""
        await self._enter(client)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, client: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(client, turn)
            else:
                self._leave()  # this job had already been given a slot
            raise

    def _leave(self) -> None:
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            if queue:
                self._queues.move_to_end(client)
            else:
                del self._queues[client]
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._num_free += 1

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(client)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[client]
