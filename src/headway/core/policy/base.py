"""What a scheduling policy decides: who goes first, who gives way, how big a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from headway.core.request import Request


class SchedulingPolicy(ABC):
    """One object owns all three decisions. It reads requests and changes nothing."""

    name: ClassVar[str]

    @abstractmethod
    def key(self, request: Request) -> Any:
        """Sort key, smaller goes first; ties go to the earlier arrival. Must not change while a request is alive."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Who gives its blocks back when they run out. `running` is in policy order and not empty."""
        return running[-1]

    def chunk_size(self, request: Request, num_offered_tokens: int) -> int:
        """How many of the tokens it could compute now (at least 1) a request takes: between 1 and the offer."""
        return num_offered_tokens
