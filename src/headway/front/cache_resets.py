"""Resets of the replicas' prefix caches: one message to each replica that runs, and the sum of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence

from headway.core.kv.manager import CacheReset
from headway.errors import EngineUnavailableError
from headway.front.replica import Replica
from headway.wire.messages import CacheResetDone, ResetCache


class CacheResets:
    """Sends resets and collects the answers."""

    LONGEST_S = 30.0
    """How long a replica may take to answer. It answers between two steps."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._awaited: dict[tuple[str, int], asyncio.Future[CacheReset]] = {}

    async def reset(self, *, with_disk: bool) -> CacheReset:
        """Reset all caches and return what became of their blocks. Raises `EngineUnavailableError` if no replica runs,
        or if one does not answer."""
        name = secrets.token_hex(8)
        asked = [replica for replica in self._replicas if replica.is_ready]
        if not asked:
            raise EngineUnavailableError("no engine is running")
        loop = asyncio.get_running_loop()
        answers = {(name, replica.place): loop.create_future() for replica in asked}
        self._awaited |= answers
        try:
            for replica in asked:
                replica.send(ResetCache(name, with_disk))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.LONGEST_S):
                    outcomes = await asyncio.gather(*answers.values())
                    return CacheReset(
                        sum(each.num_forgotten for each in outcomes), sum(each.num_kept for each in outcomes)
                    )
            raise EngineUnavailableError(f"an engine has not reset its cache within {self.LONGEST_S:g} s")
        finally:
            for key in answers:
                del self._awaited[key]

    def receive(self, place: int, answer: CacheResetDone) -> None:
        """Take the answer of a replica. Answers to other front ends that share the replica are ignored."""
        self._end(answer.name, place, CacheReset(answer.num_forgotten, answer.num_kept))

    def note_loss(self, place: int) -> None:
        """Note that a replica's process is gone, and its cache with it."""
        for name, asked in list(self._awaited):
            if asked == place:
                self._end(name, place, CacheReset(0, 0))

    def _end(self, name: str, place: int, outcome: CacheReset) -> None:
        awaited = self._awaited.get((name, place))
        if awaited is not None and not awaited.done():
            awaited.set_result(outcome)
