"""Autoscaling: adjusts the number of replicas to the load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headway.errors import ConfigError, EngineStartError

logger = logging.getLogger(__name__)

SPARE_PART = 0.6
TICK_S = 1.0
DRAIN_S = 30.0
"""The drain time of a replica that is stopped. Requests that take longer continue in another replica."""
FAILED_START_S = 30.0
"""The pause after a replica failed to start, before another start is tried."""


@dataclass
class ScalingRule:
    """Decides the number of replicas, between `least` and `most`. It adds one after requests have been queued for
    `up_s`. It removes one after `down_s` in which all requests would have fitted into `SPARE_PART` of the seats of one
    replica fewer."""

    least: int
    most: int
    up_s: float = 5.0
    down_s: float = 60.0
    _waiting_s: float = 0.0
    _spare_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"There can be 1 replica or more, and at most as many as max_replicas: {self.least} to {self.most} is "
                "no range."
            )

    def wanted(
        self, *, num_replicas: int, num_running: int, num_waiting: int, max_num_seqs: int, seconds: float
    ) -> int:
        """The number wanted after `seconds` more with this load, for replicas of `max_num_seqs` seats each."""
        seats_of_fewer = max_num_seqs * (num_replicas - 1)
        has_spare = num_running + num_waiting <= SPARE_PART * seats_of_fewer
        self._waiting_s = self._waiting_s + seconds if num_waiting else 0.0
        self._spare_s = self._spare_s + seconds if has_spare else 0.0
        if self._waiting_s >= self.up_s and num_replicas < self.most:
            self._waiting_s = self._spare_s = 0.0
            return num_replicas + 1
        if self._spare_s >= self.down_s and num_replicas > self.least:
            self._spare_s = 0.0
            return num_replicas - 1
        return num_replicas


class Load(NamedTuple):
    """The load of all replicas together."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    """Seats of a replica."""


class StoppableReplica(Protocol):
    """The part of a replica that is used here."""

    place: int
    is_idle: bool
    """Whether it has no process because none is wanted."""

    async def start(self) -> None:
        """Start it and wait until it takes requests. Raises `EngineStartError` or `OSError` if that fails."""

    async def stop(self, drain_s: float) -> None:
        """Let its requests run for at most `drain_s` seconds, then end it."""


class Autoscaler:
    """Starts and stops replicas, one at a time."""

    def __init__(
        self, rule: ScalingRule, replicas: Sequence[StoppableReplica], load: Callable[[], Load | None]
    ) -> None:
        """`load` returns the present load, or None if it is not known yet."""
        self._rule = rule
        self._replicas = replicas
        self._load = load

    async def run(self) -> None:
        """Follow the load until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            load = self._load()
            if load is not None:
                await self._follow(load)

    async def _follow(self, load: Load) -> None:
        running = [replica for replica in self._replicas if not replica.is_idle]
        wanted = self._rule.wanted(num_replicas=len(running), seconds=TICK_S, **load._asdict())
        if wanted > len(running):
            await self._start(next(replica for replica in self._replicas if replica.is_idle))
        elif wanted < len(running):
            logger.info("replica %d is not needed any more", running[-1].place)
            await running[-1].stop(DRAIN_S)

    async def _start(self, replica: StoppableReplica) -> None:
        logger.info("requests wait: replica %d is started", replica.place)
        try:
            await replica.start()
        except (EngineStartError, OSError) as error:
            logger.error("replica %d could not be started: %s", replica.place, error)
            await replica.stop(0.0)
            await asyncio.sleep(FAILED_START_S)
