"""Which replica gets a request: the same code in the server and in the simulator.

    tokens to compute     of requests that were sent to a replica: what their prompts had uncached, until the first
                          token comes, and the tokens that their answers are expected to have, as they come
    cache index           digests of the blocks that each replica's prefix cache holds, as it reports them

`prefix-aware` adds to a replica's tokens what of this request it would have to compute, and takes the smallest sum: the
longest known beginning wins unless the replica is behind by more tokens than that saves. Behind the average, that is:
tokens up to it count a quarter. One of many replicas always has next to nothing to do; compared with that one, a prefix
would be computed again wherever a request has just ended, and a fifth less was found among 16. A replica whose batch is
full comes after those with a seat, so a prefix that everybody wants spreads before requests queue for it. Of equals
the one with fewer requests is taken, and of these each in turn.

Reports are numbered. After one that was lost, a replica's blocks count as unknown until it has told all of them again.

Replicas may have roles: `computes_elsewhere` says which prompts are computed on a prefill replica and travel from there
as blocks. A prompt that is computed where others generate makes all of these wait. One that is computed elsewhere makes
none wait, but waits for others there, and then for its blocks to come:

    here         queue here  + compute                   and everyone who generates here waits for the computing
    elsewhere    queue there + compute there + transfer  and for the copying in of blocks, which is a little

Seconds of waiting are added up, over the request itself and those who generate, and the smaller sum is taken; here, if
they are equal. Of those who generate at most `MOST_COUNTED` count: a queue on a prefill replica is also one for the
prompts that come next, of whom nothing is known yet, and without a limit a full batch would fill it for seconds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.errors import ConfigError

ROUTERS: Mapping[str, str] = {
    "round-robin": "each replica in turn",
    "least-loaded": "the replica with the fewest tokens still to compute",
    "prefix-aware": "the replica with the fewest tokens to compute, this request's uncached ones among them",
}
EXPECTED_TOKENS = 256
"""How long an answer is taken for, where nothing predicts it and it may be longer."""


class CacheReport(NamedTuple):
    """How a replica's prefix cache has changed."""

    number: int
    """0, 1, 2, … for the life of a replica."""
    stored: Sequence[bytes]
    """Digests of blocks that are in the cache now and were not, or, if `is_whole`, of all that are."""
    evicted: Sequence[bytes] = ()
    is_whole: bool = False


MAX_REPORTED = 4096
"""Blocks in a report; what is left comes with the next."""


class CacheChanges:
    """What a prefix cache has to report: the difference between what it holds and what it has told."""

    def __init__(self, held: Callable[[], Iterable[bytes]]) -> None:
        """`held`: the digests of all its full blocks."""
        self._held = held
        self._changes: dict[bytes, bool] = {}  # digest → whether it was stored; oldest first
        self._number = 0
        self._starts_anew = False
        self.tell_all()

    def tell_all(self) -> None:
        """Report everything again, from the next report on."""
        self._changes = dict.fromkeys(self._held(), True)
        self._starts_anew = True

    def store(self, digest: bytes) -> None:
        """A block is kept from now on."""
        if self._changes.pop(digest, True):
            self._changes[digest] = True

    def evict(self, digest: bytes) -> None:
        """A block is not kept any more."""
        if not self._changes.pop(digest, False):
            self._changes[digest] = False

    def report(self) -> CacheReport | None:
        """The next report, if there is anything to tell."""
        if not self._changes and not self._starts_anew:
            return None
        part = list(itertools.islice(self._changes.items(), MAX_REPORTED))
        for digest, _ in part:
            del self._changes[digest]
        report = CacheReport(
            self._number,
            [digest for digest, is_stored in part if is_stored],
            [digest for digest, is_stored in part if not is_stored],
            self._starts_anew,
        )
        self._number += 1
        self._starts_anew = False
        return report


class CacheIndex:
    """What the prefix caches of all replicas hold: for each digest a bit per replica."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._own: dict[int, set[bytes]] = {}
        self._coming: dict[bytes, int] = {}
        self._next_number: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def blocks_of(self, place: int) -> Collection[bytes]:
        """The digests that a replica is known to hold."""
        return self._own.get(place, ())

    def last_number(self, place: int) -> int:
        """The number of the last report that was taken in; -1 if nothing is known of a replica."""
        return max(self._next_number.get(place, 0), 0) - 1

    def take(self, place: int, report: CacheReport) -> bool:
        """Take in a report. Returns False if one before it is missing: the replica has to tell everything again, and
        until then nothing of it is known."""
        if report.is_whole:
            self.forget(place)
        elif report.number != self._next_number.get(place, 0):
            self.forget(place)
            self._next_number[place] = -1
            return False
        self._next_number[place] = report.number + 1
        bit, own, holders = 1 << place, self._own.setdefault(place, set()), self._holders
        for digest in report.evicted:
            if digest in own:
                own.remove(digest)
                self._drop(digest, bit)
        for digest in report.stored:
            if digest not in own:
                own.add(digest)
                others = holders.get(digest)
                holders[digest] = bit if others is None else others | bit  # a number that all share, mostly
        return True

    def forget(self, place: int) -> None:
        """A replica has lost its cache, or is gone."""
        bit = 1 << place
        for digest in self._own.pop(place, ()):
            self._drop(digest, bit)
        self._next_number.pop(place, None)

    def announce(self, place: int, digests: Sequence[bytes]) -> Sequence[bytes]:
        """A replica is about to compute these blocks. Returns those that nobody has announced there: they are to be
        withdrawn when it has."""
        bit, coming = 1 << place, self._coming
        if coming.keys().isdisjoint(digests):  # mostly, and quicker than one by one
            coming.update(dict.fromkeys(digests, bit))
            return digests
        new = [digest for digest in digests if not coming.get(digest, 0) & bit]
        for digest in new:
            coming[digest] = coming.get(digest, 0) | bit
        return new

    def withdraw(self, place: int, digests: Sequence[bytes]) -> None:
        """It has computed them, and reported what it kept; or it does not."""
        others, coming = ~(1 << place), self._coming
        for digest in digests:
            if left := coming.pop(digest, 0) & others:
                coming[digest] = left

    def find(self, digests: Sequence[bytes]) -> list[tuple[int, int]]:
        """How many of the first blocks replicas hold or are about to: (bits of replicas, how many), fewest first.

        A cache that holds a block holds those before it, so replicas only become fewer along a prompt, and the next
        place where some are lost is found by halving.
        """
        found: list[tuple[int, int]] = []
        num_known = 1
        at, coming_at = self._holders.get, self._coming.get
        holders = at(digests[0], 0) | coming_at(digests[0], 0) if digests else 0
        while holders:
            # All of them hold the first `num_known` blocks; of `end` some do not, but `left` do.
            end, left = len(digests) + 1, 0
            while end - num_known > 1:
                middle = (num_known + end) // 2
                digest = digests[middle - 1]
                still = holders & (at(digest, 0) | coming_at(digest, 0))
                if still == holders:
                    num_known = middle
                else:
                    end, left = middle, still
            found.append((holders & ~left, num_known))
            num_known, holders = end, left
        return found

    def _drop(self, digest: bytes, bit: int) -> None:
        left = self._holders[digest] & ~bit
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]


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


def places_of(bits: int) -> list[int]:
    """Of replicas, from their bits."""
    if not bits & (bits - 1):  # one at most, as a rule
        return [bits.bit_length() - 1] if bits else []
    return [place for place, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


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
        """Another replica computes its prompt, but for so many tokens; its blocks are still going to be here."""
        routed = self._routed[request_id]
        num_spared = routed.num_prompt_tokens - num_left
        routed.num_prompt_tokens = num_left
        self._replicas[routed.place].num_prompt_tokens -= num_spared
        self._count(routed.place, -num_spared)

    def note_tokens(self, request_id: str, num_tokens: int) -> None:
        """So many tokens of its answer have come."""
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
        """A replica has so many more, or fewer. Note how good a choice it is; smaller is better: has a seat, fewer
        tokens, fewer requests. One number, so that a hundred replicas are compared in microseconds."""
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


TOGETHER = "together"
"""Instead of roles: every replica computes the prompts of its own requests."""

SHORT_TOKENS = 256
"""So many prompt tokens are always computed where the answer is: beside a batch that generates they cost about one
step, and another replica would first have to be asked."""
MOST_COUNTED = 8
"""Of the requests that generate, as many count. Of 1 to 64, the mean time of whole requests was shortest about here in
simulations (8B on an H200; prompts of 1k and 4k, loads of 70% and 85%)."""
COPYING_SHARE = 0.1
"""Of the time of a transfer, what those who generate lose: blocks are copied into the device's memory beside steps."""
BLOCK_S = 2e-5
"""What both replicas have to do for a block beside sending its bytes: find, announce, insert."""


@dataclass(frozen=True)
class Roles:
    """How many replicas compute prompts only, and how many have requests from their arrival to their end."""

    num_prefill: int
    num_decode: int

    @staticmethod
    def parse(text: str) -> Roles:
        """From 'prefill=1,decode=3'."""
        found = re.fullmatch(r"prefill=([1-9]\d*),decode=([1-9]\d*)", text)
        if found is None:
            raise ConfigError(f"roles are given as prefill=P,decode=D, such as prefill=1,decode=3; not {text!r}.")
        return Roles(int(found[1]), int(found[2]))

    @property
    def num_replicas(self) -> int:
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"prefill={self.num_prefill},decode={self.num_decode}"


@dataclass(frozen=True)
class PrefillChoice:
    """What is known when a decode replica has been chosen for a request, of it and of the best prefill replica."""

    num_uncached: int
    """Tokens of the prompt that the decode replica does not have."""
    num_queued_prefill: int
    """Tokens of other prompts that the prefill replica has to compute first."""
    num_queued_decode: int
    """And the decode replica."""
    num_generating: int
    """Requests that have their first token, on the decode replica."""
    prefill_token_s: float
    """Seconds for a prompt token on the prefill replica."""
    decode_token_s: float
    """What a prompt token adds to a step of the decode replica, in seconds."""
    transfer_s: float
    """For all blocks that would travel."""
    num_blocks: int
    """How many these are: whole ones only, so the last few tokens of a prompt are computed here in any case."""


def computes_elsewhere(choice: PrefillChoice) -> bool:
    """Whether the prompt is better computed on the prefill replica. More requests that generate, or a longer queue, on
    the decode replica never turn a yes into a no; nor a longer queue on the prefill replica, or a slower transfer, a no
    into a yes."""
    if choice.num_uncached <= SHORT_TOKENS or not choice.num_blocks:
        return False
    block_s = BLOCK_S * choice.num_blocks
    compute_s = choice.decode_token_s * choice.num_uncached
    here_s = choice.decode_token_s * choice.num_queued_decode + compute_s
    there_s = choice.prefill_token_s * (choice.num_queued_prefill + choice.num_uncached) + choice.transfer_s + block_s
    spared_s = max(compute_s - COPYING_SHARE * choice.transfer_s - block_s, 0.0)  # each of those who generate
    return there_s < here_s + min(choice.num_generating, MOST_COUNTED) * spared_s
