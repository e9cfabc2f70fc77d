"""Sums over the waiting requests, so that a forecast need not look at each of them.

The policy gives each request a rank: those with a smaller or about the same rank are ahead of a newcomer. Ranks and
sizes are kept in classes that are at most an eighth wide, so there are a few dozen sums, however many requests wait.

    rank    │ 0 – 1    │ 2        │ 3 …           requests and tokens of each class
    size    │ – 512    │ – 576    │ – 640 …       tokens of each class
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from headway.core.request import Request


class Waiting(NamedTuple):
    """Some of the waiting requests together."""

    num_requests: int
    num_tokens: int


class _Place(NamedTuple):
    rank: int
    size: int
    num_tokens: int


class WaitingTotals:
    """The sums of all requests that wait or fetch blocks. `rank`: see `SchedulingPolicy.rank`."""

    def __init__(self, rank: Callable[[Request], float]) -> None:
        self._rank = rank
        self._places: dict[Request, _Place] = {}
        self._by_rank: dict[int, Waiting] = {}
        self._by_size: dict[int, Waiting] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, request: Request) -> None:
        """Count a request that is being queued. Its rank is looked up once."""
        num_tokens = request.num_tokens
        place = _Place(_class_of(self._rank(request)), _class_of(num_tokens), num_tokens)
        self._places[request] = place
        _change(self._by_rank, place.rank, 1, num_tokens)
        _change(self._by_size, place.size, 1, num_tokens)
        self.num_tokens += num_tokens

    def remove(self, request: Request) -> None:
        """Stop counting a request that is admitted or has ended."""
        place = self._places.pop(request)
        _change(self._by_rank, place.rank, -1, -place.num_tokens)
        _change(self._by_size, place.size, -1, -place.num_tokens)
        self.num_tokens -= place.num_tokens

    def ahead_of(self, request: Request) -> Waiting:
        """Return the waiting requests that are ahead of this newcomer."""
        return self._up_to(self._by_rank, _class_of(self._rank(request)))

    def up_to_size(self, num_tokens: float) -> Waiting:
        """Return the waiting requests with at most about this many tokens each."""
        return self._up_to(self._by_size, _class_of(num_tokens))

    @staticmethod
    def _up_to(sums: dict[int, Waiting], last: int) -> Waiting:
        found = [one for number, one in sums.items() if number <= last]
        return Waiting(sum(one.num_requests for one in found), sum(one.num_tokens for one in found))

    def check_invariants(self, waiting: set[Request]) -> None:
        """Raise `AssertionError` unless exactly these requests are counted."""
        assert self._places.keys() == waiting, "the sums are of other requests than those that wait"
        assert all(request.num_tokens == place.num_tokens for request, place in self._places.items())
        assert self.num_tokens == sum(request.num_tokens for request in waiting), "the sum of tokens is wrong"
        for sums in (self._by_rank, self._by_size):
            assert sum(one.num_requests for one in sums.values()) == len(waiting), "the sums of requests are wrong"
            assert sum(one.num_tokens for one in sums.values()) == self.num_tokens, "the sums of tokens are wrong"
            assert all(one.num_requests for one in sums.values()), "a class without requests is kept"


def _change(sums: dict[int, Waiting], number: int, num_requests: int, num_tokens: int) -> None:
    before = sums.get(number, Waiting(0, 0))
    after = Waiting(before.num_requests + num_requests, before.num_tokens + num_tokens)
    if after.num_requests:
        sums[number] = after
    else:
        del sums[number]


def _class_of(value: float) -> int:
    """Return the number of the class of a rank or size. It never falls when the value grows. There are eight classes
    from one power of two to the next."""
    if not value:
        return 0
    mantissa, exponent = math.frexp(abs(value))  # the mantissa is in [0.5, 1)
    number = 8 * (exponent + 1100) + int(8.0 * (2.0 * mantissa - 1.0))  # no number has an exponent below -1100
    return number if value > 0 else -number
