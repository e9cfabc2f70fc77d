"""The interface of an engine to which requests are sent: a `Replica`, or a substitute in tests."""

from __future__ import annotations

from typing import Protocol

from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest, EngineReady


class RemoteEngine(Protocol):
    """An engine with a fixed place among others. Its process may be replaced."""

    place: int
    info: EngineReady | None
    """The description that it sent when it was last ready."""
    stats: EngineStats
    """Statistics as of its last step."""
    is_leaving: bool
    """Whether it has announced that it takes no more requests."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""

    def add(self, request: AddRequest) -> None:
        """Send it a request. Raises `InvalidRequestError` if the request does not fit into a message."""

    def abort(self, request_id: str) -> None:
        """Abort a request. No delta follows for it."""
