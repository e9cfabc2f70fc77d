"""Chooses the replica for each request, with the same code in the server and in the simulator.

    tokens to compute     of requests that were sent to a replica: what their prompts had uncached, until the first
                          token comes, and the tokens that their answers are expected to have, as they come
    cache index           digests of the blocks that each replica's prefix cache holds, as it reports them

`prefix-aware` adds the tokens of this request that a replica would have to compute to the replica's other tokens, and
chooses the smallest sum. The longest cached prefix wins unless its replica has more other tokens to compute than the
prefix saves. Tokens up to the average of all replicas count only a quarter: one of many replicas always has almost
nothing to do, and a prefix would be computed again wherever a request has just ended (with 16 replicas a fifth less was
found in caches). A replica with a full batch comes after those with a free seat, so a prefix shared by many requests
spreads before they queue for it. Ties go to the replica with fewer requests, then to each in turn.

Reports are numbered. After a lost report a replica's blocks count as unknown until it has reported its whole cache.
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
"""The largest assumed length of an answer without a prediction, in tokens."""


@dataclass(slots=True)
class _Routed:
    """A request that was routed to a replica."""

    place: int
    num_prompt_tokens: int
    """Prompt tokens that were not cached there; 0 once its first token was sampled."""
    num_answer_tokens: int
    """Tokens that its answer is still expected to get."""
    announced: Sequence[bytes]
    """Digests of the blocks that it is computing, which other requests may count on."""


@dataclass(slots=True)
class _Replica:
    max_num_seqs: int
    num_tokens: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    """The prompt tokens among `num_tokens`."""
    num_generating: int = 0
    """The requests among `num_requests` that have their first token."""
    is_suspended: bool = False


_REQUEST_BITS = 24
_RANK_BITS = 64
_ABSENT = 3 << _RANK_BITS


class Router:
    """Chooses replicas, and counts the requests and tokens that it has routed to each."""

    def __init__(self, name: str, *, block_size: int, counts_uncached: bool = False) -> None:
        """`counts_uncached`: look up digests even if the choice does not depend on them, for `num_uncached`."""
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
        """Whether the content of caches matters."""
        return self.name == "prefix-aware" or self._counts_uncached

    def add(self, place: int, *, max_num_seqs: int) -> None:
        """Add a replica that takes requests. It has an empty cache and nothing to do."""
        self._keys += [_ABSENT] * (place + 1 - len(self._keys))
        self._replicas[place] = _Replica(max_num_seqs)
        self._count(place)

    def remove(self, place: int) -> None:
        """Remove a replica and forget its requests."""
        self.index.forget(place)
        replica = self._replicas.pop(place, None)
        if replica is not None:
            self._keys[place] = _ABSENT
            self._num_tokens -= replica.num_tokens
            for request_id in [own for own, routed in self._routed.items() if routed.place == place]:
                self.index.withdraw(place, self._routed.pop(request_id).announced)

    def suspend(self, place: int, is_suspended: bool) -> None:
        """Set whether a replica gets requests only if no other replica can."""
        replica = self._replicas.get(place)
        if replica is not None and replica.is_suspended != is_suspended:
            replica.is_suspended = is_suspended
            self._count(place)

    @property
    def has_healthy(self) -> bool:
        """Whether there is a replica that is not suspended."""
        return any(not replica.is_suspended for replica in self._replicas.values())

    def num_tokens(self, place: int) -> int:
        """The tokens that a replica has to compute, as counted here."""
        return self._replicas[place].num_tokens

    def num_prompt_tokens(self, place: int) -> int:
        """The prompt tokens that a replica has to compute."""
        return self._replicas[place].num_prompt_tokens

    def num_generating(self, place: int) -> int:
        """How many requests of a replica have their first token."""
        return self._replicas[place].num_generating

    def num_uncached(self, request_id: str) -> int:
        """The prompt tokens of a routed request that its replica still has to compute; 0 after its first token."""
        return self._routed[request_id].num_prompt_tokens

    def route(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        num_answer_tokens: int,
        digests: Callable[[], Sequence[bytes]],
    ) -> int:
        """Choose the replica for a request and count it there. `digests` returns those of the prompt's full blocks; it
        is called only if they matter."""
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
        """Note that another replica computes a request's prompt except for `num_left` tokens. The blocks are still
        expected in this replica's cache."""
        routed = self._routed[request_id]
        num_spared = routed.num_prompt_tokens - num_left
        routed.num_prompt_tokens = num_left
        self._replicas[routed.place].num_prompt_tokens -= num_spared
        self._count(routed.place, -num_spared)

    def note_tokens(self, request_id: str, num_tokens: int) -> None:
        """Note new tokens of a request's answer."""
        routed = self._routed.get(request_id)
        if routed is not None:
            num_done = min(num_tokens, routed.num_answer_tokens)
            routed.num_answer_tokens -= num_done
            if routed.num_prompt_tokens:
                self._begin(routed)
            self._count(routed.place, -num_done)
            self._withdraw(routed)

    def end(self, request_id: str) -> None:
        """Stop counting a request that has ended or moves to another replica."""
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            if routed.num_prompt_tokens:
                self._begin(routed)
            self._replicas[routed.place].num_generating -= 1
            self._count(routed.place, -routed.num_answer_tokens, -1)
            self._withdraw(routed)

    def _begin(self, routed: _Routed) -> None:
        """Count a request as generating: its prompt is computed."""
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
        """Change a replica's counts and update its key. Smaller keys are better: a free seat, then fewer tokens, then
        fewer requests. The key is one number, so that a hundred replicas are compared in microseconds."""
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
        """The next replica in turn. Suspended replicas are used only if there is no other."""
        ranks = [key >> _RANK_BITS for key in self._keys]
        best = min(ranks)
        best = max(best, 1)  # a full batch does not count here
        order = [*range(self._last + 1, len(ranks)), *range(self._last + 1)]
        chosen: int = next(place for place in order if ranks[place] <= best)
        return chosen

    def _cheapest(self, found: Sequence[tuple[int, int]], num_prompt_tokens: int) -> tuple[int, int]:
        """The replica with the lowest cost, and how many of the prompt's blocks it has."""
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
        """The key that a replica would have with this request, except that its tokens up to the average count less."""
        up_to_average = min(self._replicas[place].num_tokens, self._num_tokens // len(self._replicas))
        return self._keys[place] + (num_uncached - up_to_average * 3 // 4 << _REQUEST_BITS)

    def _lightest(self) -> int:
        """The replica with the least to do; of equals, the next in turn."""
        keys = self._keys
        best = min(keys)
        try:
            return keys.index(best, self._last + 1)
        except ValueError:
            return keys.index(best)

    def _uncached(self, num_blocks: int, num_prompt_tokens: int) -> int:
        """Prompt tokens to compute. The last token of a fully cached prompt is computed all the same."""
        return max(num_prompt_tokens - num_blocks * self.block_size, 1)


def expected_tokens(max_tokens: int, predicted_tokens: float | None) -> int:
    """The expected number of tokens of an answer."""
    if predicted_tokens is not None:
        return max(1, min(int(predicted_tokens), max_tokens))
    return min(max_tokens, EXPECTED_TOKENS)
