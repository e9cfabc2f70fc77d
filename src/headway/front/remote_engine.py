"""What sending a request to an engine needs of it: a `Replica`, or what a test has in its place."""

from __future__ import annotations

from typing import Protocol

from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest, EngineReady


class RemoteEngine(Protocol):
    """Its place among others does not change, the process behind may."""

    place: int
    info: EngineReady | None
    """What it said of itself when it got ready, the last time."""
    stats: EngineStats
    """As of its last step."""
    is_leaving: bool
    """Whether it has said that it takes no requests any more."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""

    def add(self, request: AddRequest) -> None:
        """Hand it a request. `InvalidRequestError` if it does not fit into a message."""

    def abort(self, request_id: str) -> None:
        """End a request there; nothing more comes of it."""
