"""An index of the blocks in the replicas' prefix caches, as the replicas report them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.core.kv.cache_report import CacheReport


def places_of(bits: int) -> list[int]:
    """The places of the replicas whose bits are set."""
    if not bits & (bits - 1):  # one at most, as a rule
        return [bits.bit_length() - 1] if bits else []
    return [place for place, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


class CacheIndex:
    """The blocks in the prefix caches of all replicas: for each digest a bit per replica."""

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
        """The number of the last report applied; -1 if nothing is known of the replica."""
        return max(self._next_number.get(place, 0), 0) - 1

    def apply(self, place: int, report: CacheReport) -> bool:
        """Apply a report. Returns False if an earlier one is missing: the replica is then forgotten until it has
        reported its whole cache again."""
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
        """Forget a replica that has lost its cache or is gone."""
        bit = 1 << place
        for digest in self._own.pop(place, ()):
            self._drop(digest, bit)
        self._next_number.pop(place, None)

    def announce(self, place: int, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Note that a replica is about to compute these blocks. Returns those not announced there before; `withdraw`
        must be called for them when the replica has computed them."""
        bit, coming = 1 << place, self._coming
        if coming.keys().isdisjoint(digests):  # mostly, and quicker than one by one
            coming.update(dict.fromkeys(digests, bit))
            return digests
        new = [digest for digest in digests if not coming.get(digest, 0) & bit]
        for digest in new:
            coming[digest] = coming.get(digest, 0) | bit
        return new

    def withdraw(self, place: int, digests: Sequence[bytes]) -> None:
        """Take back an announcement: the replica has computed the blocks and reported those it kept, or will not
        compute them."""
        others, coming = ~(1 << place), self._coming
        for digest in digests:
            if left := coming.pop(digest, 0) & others:
                coming[digest] = left

    def find(self, digests: Sequence[bytes]) -> list[tuple[int, int]]:
        """Pairs (bits of replicas, number of leading blocks that these hold or are about to compute), with the fewest
        blocks first.

        A cache that holds a block holds all blocks before it. Along a prompt the set of replicas therefore only
        shrinks, and binary search finds where it shrinks next.
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
