"""Which replica gets a request: the same code in the server and in the simulator.

    tokens to compute     of requests that were sent to a replica: what their prompts had uncached, until the first
                          token comes, and the tokens that their answers are expected to have, as they come
    cache index           digests of the blocks that each replica's prefix cache holds, as it reports them

`prefix-aware` adds to a replica's tokens what of this request it would have to compute, and takes the smallest sum: the
longest known beginning wins unless the replica has more other tokens to compute than that saves. Tokens up to the
average of all replicas count only a quarter: one of many replicas always has next to nothing to do, and compared with
that one a prefix would be computed again wherever a request has just ended (a fifth less was found among 16). A replica
whose batch is full comes after those with a seat, so a prefix that many requests have spreads before they queue for it.
Of equals the one with fewer requests is taken, and of these each in turn.

Reports are numbered. After one that was lost, a replica's blocks count as unknown until it has reported all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.front.cache_index import CacheIndex, places_of

ROUTERS: Mapping[str, str] = {
    "round-robin": "each replica in turn",
    "least-loaded": "the replica with the fewest tokens still to compute",
    "prefix-aware": "the replica with the fewest tokens to compute, this request's uncached ones among them",
}
EXPECTED_TOKENS = 256
"""How long an answer is taken for, where nothing predicts it and it may be longer."""


@dataclass(slots=True)
class _Routed:
    """A request that a replica has."""

    place: int
    num_prompt_tokens: int
    """Of its prompt, what was not cached there; 0 once its first token is out."""
    num_answer_tokens: int
    """What its answer is expected to have yet."""
    announced: Sequence[bytes]
    """Blocks that others may count on while it computes them."""


@dataclass(slots=True)
class _Replica:
    max_num_seqs: int
    num_tokens: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    """Of `num_tokens`, what is of prompts."""
    num_generating: int = 0
    """Of `num_requests`, those whose first token is out."""
    is_suspended: bool = False


_REQUEST_BITS = 24
_RANK_BITS = 64
_ABSENT = 3 << _RANK_BITS


class Router:
    """Chooses, and keeps count of what it has chosen."""

    def __init__(self, name: str, *, block_size: int, counts_uncached: bool = False) -> None:
        """`counts_uncached`: what caches hold is asked for although no choice depends on it, for `num_uncached`."""
        if name not in ROUTERS:
            raise ConfigError(f"router must be one of {', '.join(ROUTERS)}; not {name!r}.")
        self.name = name
        self._counts_uncached = counts_uncached
        self.block_size = block_size
        self.index = CacheIndex()
        self._replicas: dict[int, _Replica] = {}
        self._keys: list[int] = []  # by place
        self._routed: dict[str, _Routed] = {}
        self._num_tokens = 0  # of all replicas
        self._last = -1  # where the request before went

    @property
    def needs_digests(self) -> bool:
        """Whether it matters what caches hold."""
        return self.name == "prefix-aware" or self._counts_uncached

    def add(self, place: int, *, max_num_seqs: int) -> None:
        """A replica takes requests, with an empty cache and nothing to do."""
        self._keys += [_ABSENT] * (place + 1 - len(self._keys))
        self._replicas[place] = _Replica(max_num_seqs)
        self._count(place)

    def remove(self, place: int) -> None:
        """It takes none any more; those that it had are forgotten."""
        self.index.forget(place)
        replica = self._replicas.pop(place, None)
        if replica is not None:
            self._keys[place] = _ABSENT
            self._num_tokens -= replica.num_tokens
            for request_id in [own for own, routed in self._routed.items() if routed.place == place]:
                self.index.withdraw(place, self._routed.pop(request_id).announced)

    def suspend(self, place: int, is_suspended: bool) -> None:
        """Whether a replica is to get requests only if no other can."""
        replica = self._replicas.get(place)
        if replica is not None and replica.is_suspended != is_suspended:
            replica.is_suspended = is_suspended
            self._count(place)

    @property
    def has_healthy(self) -> bool:
        """Whether there is a replica that is not suspended."""
        return any(not replica.is_suspended for replica in self._replicas.values())

    def num_tokens(self, place: int) -> int:
        """What a replica has to compute, as far as is known here."""
        return self._replicas[place].num_tokens

    def num_prompt_tokens(self, place: int) -> int:
        """What of that is of prompts."""
        return self._replicas[place].num_prompt_tokens

    def num_generating(self, place: int) -> int:
        """How many requests of a replica have their first token."""
        return self._replicas[place].num_generating

    def num_uncached(self, request_id: str) -> int:
        """Of a routed request's prompt, what its replica has to compute yet; 0 once its first token is out."""
        return self._routed[request_id].num_prompt_tokens

    def route(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        num_answer_tokens: int,
        digests: Callable[[], Sequence[bytes]],
    ) -> int:
        """The replica for a request. `digests`, of the full blocks of its prompt, are asked for only if they matter."""
        if not self._replicas:
            raise ValueError("there is no replica to choose from")
        known = digests() if self.needs_digests and (len(self._replicas) > 1 or self._counts_uncached) else ()
        found = self.index.find(known)
        if self.name == "prefix-aware":
            place, num_found = self._cheapest(found, num_prompt_tokens)
        else:
            place = self._next() if self.name == "round-robin" else self._lightest()
            num_found = next((count for holders, count in found if holders >> place & 1), 0)
        self._last = place
        announced = self.index.announce(place, known[num_found:]) if known else ()
        routed = _Routed(place, self._uncached(num_found, num_prompt_tokens), num_answer_tokens, announced)
        self._routed[request_id] = routed
        self._replicas[place].num_prompt_tokens += routed.num_prompt_tokens
        self._count(place, routed.num_prompt_tokens + routed.num_answer_tokens, 1)
        return place

    def note_elsewhere(self, request_id: str, num_left: int) -> None:
        """Another replica computes its prompt, but for `num_left` tokens; its blocks are still going to be here."""
        routed = self._routed[request_id]
        num_spared = routed.num_prompt_tokens - num_left
        routed.num_prompt_tokens = num_left
        self._replicas[routed.place].num_prompt_tokens -= num_spared
        self._count(routed.place, -num_spared)

    def note_tokens(self, request_id: str, num_tokens: int) -> None:
        """Tokens of its answer have come."""
        routed = self._routed.get(request_id)
        if routed is not None:
            num_done = min(num_tokens, routed.num_answer_tokens)
            routed.num_answer_tokens -= num_done
            if routed.num_prompt_tokens:
                self._begin(routed)
            self._count(routed.place, -num_done)
            self._withdraw(routed)

    def end(self, request_id: str) -> None:
        """It has ended, or moves."""
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            if routed.num_prompt_tokens:
                self._begin(routed)
            self._replicas[routed.place].num_generating -= 1
            self._count(routed.place, -routed.num_answer_tokens, -1)
            self._withdraw(routed)

    def _begin(self, routed: _Routed) -> None:
        """Its prompt is computed."""
        replica = self._replicas[routed.place]
        replica.num_prompt_tokens -= routed.num_prompt_tokens
        replica.num_generating += 1
        replica.num_tokens -= routed.num_prompt_tokens
        self._num_tokens -= routed.num_prompt_tokens
        routed.num_prompt_tokens = 0

    def _withdraw(self, routed: _Routed) -> None:
        if routed.announced:
            self.index.withdraw(routed.place, routed.announced)
            routed.announced = ()

    def _count(self, place: int, num_tokens: int = 0, num_requests: int = 0) -> None:
        """A replica has more to do, or less. Note how good a choice it is; smaller is better: has a seat, fewer tokens,
        fewer requests. It is one number, so that a hundred replicas are compared in microseconds."""
        replica = self._replicas[place]
        replica.num_tokens += num_tokens
        replica.num_requests += num_requests
        self._num_tokens += num_tokens
        key = (replica.num_tokens << _REQUEST_BITS) + replica.num_requests
        if replica.is_suspended:
            key += 2 << _RANK_BITS
        elif replica.num_requests >= replica.max_num_seqs:
            key += 1 << _RANK_BITS
        self._keys[place] = key

    def _next(self) -> int:
        """The next one in turn, suspended ones only if there is no other."""
        ranks = [key >> _RANK_BITS for key in self._keys]
        best = min(ranks)
        best = max(best, 1)  # a full batch does not count here
        order = [*range(self._last + 1, len(ranks)), *range(self._last + 1)]
        chosen: int = next(place for place in order if ranks[place] <= best)
        return chosen

    def _cheapest(self, found: Sequence[tuple[int, int]], num_prompt_tokens: int) -> tuple[int, int]:
        """The replica, and how many of the prompt's blocks it has."""
        place = lightest = self._lightest()
        if not found:
            return place, 0
        num_found, cost = 0, self._cost(lightest, num_prompt_tokens)
        for holders, count in found:
            # Of those that have as many blocks, the one with the least to do.
            has_lightest = holders >> lightest & 1
            other = lightest if has_lightest else min(places_of(holders), key=self._keys.__getitem__)
            own = self._cost(other, self._uncached(count, num_prompt_tokens))
            if own < cost:
                place, num_found, cost = other, count, own
        return place, num_found

    def _cost(self, place: int, num_uncached: int) -> int:
        """The key that a replica would have with this request, but for tokens up to the average: they count less."""
        up_to_average = min(self._replicas[place].num_tokens, self._num_tokens // len(self._replicas))
        return self._keys[place] + (num_uncached - up_to_average * 3 // 4 << _REQUEST_BITS)

    def _lightest(self) -> int:
        """The replica with the least to do; of equals the next in turn."""
        keys = self._keys
        best = min(keys)
        try:
            return keys.index(best, self._last + 1)
        except ValueError:
            return keys.index(best)

    def _uncached(self, num_blocks: int, num_prompt_tokens: int) -> int:
        """Of a prompt that is known to its end the last token is computed all the same."""
        return max(num_prompt_tokens - num_blocks * self.block_size, 1)


def expected_tokens(max_tokens: int, predicted_tokens: float | None) -> int:
    """How many tokens an answer is going to have."""
    if predicted_tokens is not None:
        return max(1, min(int(predicted_tokens), max_tokens))
    return min(max_tokens, EXPECTED_TOKENS)
