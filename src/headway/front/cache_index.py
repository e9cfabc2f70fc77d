"""Which replica's prefix cache holds which block, as far as they have reported."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.core.kv.cache_report import CacheReport


def places_of(bits: int) -> list[int]:
    """Of replicas, from their bits."""
    if not bits & (bits - 1):  # one at most, as a rule
        return [bits.bit_length() - 1] if bits else []
    return [place for place, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


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

    def apply(self, place: int, report: CacheReport) -> bool:
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
        """A replica is about to compute these blocks. Returns those that were not announced there yet: they are to be
        withdrawn when it has computed them."""
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
