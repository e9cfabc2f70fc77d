"""Which of several replicas serves a request. A router decides once, when the request arrives.

    round-robin    each in turn
    least-loaded   the one with the fewest outstanding tokens
    prefix-aware   the one that has been sent most of the request's beginning before, unless it has so much more to do
                   than another that this outweighs the tokens saved

Routers know what passes through them, not what replicas do inside: which requests were sent where, and which tokens
came back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from headway.core import Request
from headway.errors import ConfigError


class RoutedReplica(Protocol):
    """What a router may ask about a replica."""

    def num_outstanding_tokens(self, now_s: float) -> int:
        """Tokens that it has yet to compute."""
        ...


class Router(Protocol):
    def choose(self, request: Request, replicas: Sequence[RoutedReplica], *, now_s: float) -> int:
        """The place of the one that is to serve this request."""
        ...


class RoundRobin:
    def __init__(self) -> None:
        self._num_routed = 0

    def choose(self, request: Request, replicas: Sequence[RoutedReplica], *, now_s: float) -> int:
        place = self._num_routed % len(replicas)
        self._num_routed += 1
        return place


class LeastLoaded:
    """The fewest outstanding tokens; of several, the first."""

    def choose(self, request: Request, replicas: Sequence[RoutedReplica], *, now_s: float) -> int:
        loads = [replica.num_outstanding_tokens(now_s) for replica in replicas]
        return loads.index(min(loads))


class PrefixAware:
    """The fewest tokens to do with the request among them, where those that were sent there before are free.

    So the longest known beginning wins, unless that replica is behind another by more tokens than it would save: a
    system prompt that all requests share does not bring them all to one place.
    """

    def __init__(self, *, block_size: int, num_blocks: int) -> None:
        """`num_blocks`: of how many blocks it is remembered that a replica was sent them, the last ones."""
        self._block_size, self._num_blocks = block_size, num_blocks
        self._sent: dict[int, OrderedDict[bytes, None]] = {}

    def choose(self, request: Request, replicas: Sequence[RoutedReplica], *, now_s: float) -> int:
        digests = request.block_digests(self._block_size, request.num_prompt_tokens // self._block_size)
        to_do = [
            replica.num_outstanding_tokens(now_s) - self._block_size * self._num_found(place, digests)
            for place, replica in enumerate(replicas)
        ]
        place = to_do.index(min(to_do))
        self._remember(place, digests)
        return place

    def _num_found(self, place: int, digests: Sequence[bytes]) -> int:
        """How many of its first blocks this replica was sent."""
        sent = self._sent.get(place, OrderedDict())
        for count, digest in enumerate(digests):
            if digest not in sent:
                return count
        return len(digests)

    def _remember(self, place: int, digests: Sequence[bytes]) -> None:
        sent = self._sent.setdefault(place, OrderedDict())
        for digest in digests:
            sent[digest] = None
            sent.move_to_end(digest)
        while len(sent) > self._num_blocks:
            sent.popitem(last=False)


ROUTERS: Mapping[str, str] = {
    "round-robin": "each replica in turn",
    "least-loaded": "the replica with the fewest outstanding tokens",
    "prefix-aware": "the replica that was sent most of the prompt's beginning before, unless its load outweighs that",
}


def create_router(name: str, *, block_size: int, num_blocks: int) -> Router:
    """By its name; `block_size` and `num_blocks` are those of a replica."""
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case "prefix-aware":
            return PrefixAware(block_size=block_size, num_blocks=num_blocks)
    raise ConfigError(f"router must be one of {', '.join(ROUTERS)}; not {name!r}.")
