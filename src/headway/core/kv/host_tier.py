"""Blocks that had to leave the device and stay in host memory, found again by their digests; and blocks further away.

    device   in use ──► kept (idle) ──► evicted
                ▲                          │ copied out, before the block is written again
                │ copied in                ▼
    host        └───────────────────── a slot of the tier ──► forgotten, the slot that was used longest ago first
                                           │  ▲
                                    stored ▼  │ fetched
    far                              a folder on disk, or another replica

Only bookkeeping is here: which digest is in which slot, and what is known to be on disk. The runner copies the bytes
between device and host, in the order of the plan. Fetches and stores run beside the steps: until one is done, its slot
is not given to others, and a slot that is being filled is not found.

What is on disk already, or could not be stored, is clean: it can be forgotten at once. Once slots become scarce, those
that are not clean are stored, the oldest first, before they are needed; if that is too slow, blocks are dropped.
"""

from __future__ import annotations

import collections
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from headway.counters import Counter, Gauge, Statistics

MAX_STORES = 64
"""Blocks that are being stored at the same time."""
_NUM_CLEAN_LOOKS = 64  # so many of the oldest blocks are looked at for a clean one
_SMOOTHING = 0.03  # least weight of the latest fetch in the mean time of one: many come at once, then none for a while
_FADING = 0.99  # a fetch that was not worth it: the next seems so much shorter, so that it is tried again some time


class HostTierStats(Statistics):
    """Blocks in host memory and on disk, and their ways between the two and the device."""

    num_host_blocks: Annotated[int, Gauge("kv_blocks_host", "KV blocks kept in host memory.")] = 0
    num_disk_blocks: Annotated[int, Gauge("kv_blocks_disk", "KV blocks known to be on disk.")] = 0
    num_moved_out_blocks: Annotated[int, Counter("kv_blocks_moved_out", "KV blocks copied to host memory.")] = 0
    num_moved_in_blocks: Annotated[int, Counter("kv_blocks_moved_in", "KV blocks copied back from host memory.")] = 0
    num_fetched_blocks: Annotated[
        int, Counter("kv_blocks_fetched", "KV blocks fetched from disk or another replica.")
    ] = 0
    num_failed_fetches: Annotated[
        int,
        Counter(
            "kv_blocks_not_fetched",
            "KV blocks that should have been fetched from disk or another replica but were computed instead.",
        ),
    ] = 0
    fetch_s: Annotated[float, Counter("kv_blocks_fetch_seconds", "Time that fetches of KV blocks took.")] = 0.0
    """One after the other."""
    num_stored_blocks: Annotated[int, Counter("kv_blocks_stored", "KV blocks written to disk.")] = 0
    num_unstored_blocks: Annotated[
        int, Counter("kv_blocks_not_stored", "KV blocks that could not be written to disk.")
    ] = 0
    num_dropped_blocks: Annotated[int, Counter()] = 0
    """Of these, those that left host memory before it was their turn."""

    @property
    def num_failed_stores(self) -> int:
        return self.num_unstored_blocks - self.num_dropped_blocks


class FarIndex:
    """Digests of blocks that are on disk, as far as is known here; those used longest ago are forgotten first."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        """It is there, and was used just now."""
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self.max_blocks:
            self._digests.popitem(last=False)

    def discard(self, digest: bytes) -> None:
        """It is not there, or cannot be used."""
        self._digests.pop(digest, None)

    def latest(self, most: int) -> list[bytes]:
        """So many that were used last, the very last one first."""
        return list(itertools.islice(reversed(self._digests), most))


class HostTier:
    """A fixed number of slots, each for one full block."""

    def __init__(self, num_slots: int, *, far: FarIndex | None = None) -> None:
        """`far`: what is on disk; without it nothing is stored."""
        if num_slots < 1:
            raise ValueError(f"a host tier needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self.far = far
        self.stats = HostTierStats()
        self.fetch_block_s: dict[str, float] = {}
        """How long it takes to fetch a block, in the mean, by source."""
        self._num_timed = 0  # fetches in that
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the one used longest ago first
        self._free = list(range(num_slots - 1, -1, -1))
        self._read_by_next_step: set[int] = set()
        # Slots that steps copy to whose results have not come.
        self._unlanded = collections.Counter[int]()
        self._fetching: dict[bytes, tuple[int, str]] = {}  # slots that are being filled, and from where
        # Blocks that requests have had fetched and not yet used; by how many.
        self._held = collections.Counter[bytes]()
        self._storing: dict[bytes, int] = {}  # slots that are being read; they are among `_slots`
        self._unclean: OrderedDict[bytes, None] = OrderedDict()  # of `_slots`: what has to be stored, the oldest first
        self._fetches: list[tuple[bytes, int, str]] = []  # these two as in `BlockMoves`, to be taken
        self._stores: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def __iter__(self) -> Iterator[bytes]:
        """What was used longest ago comes first."""
        return iter(self._slots)

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """How much of a chain is here, from its first block on."""
        found = []
        for digest in digests:
            if digest not in self._slots:
                break
            found.append(digest)
        return found

    def slot_of(self, digest: bytes) -> int | None:
        """Where a block is, if its bytes are there: no step that copies them is in flight."""
        slot = self._slots.get(digest)
        return None if slot is None or slot in self._unlanded else slot

    def put(self, digest: bytes) -> int | None:
        """Take a slot for a block that is about to be evicted. `None` if it is here already or about to be, or no slot
        can be given up."""
        if digest in self._slots:
            self.touch([digest])
            return None
        if digest in self._fetching:
            return None
        slot = self._free.pop() if self._free else self._take_oldest()
        if slot is None:
            return None
        self._slots[digest] = slot
        self._unlanded[slot] += 1
        if self.far is not None and digest not in self.far:
            self._unclean[digest] = None
        self.stats.num_moved_out_blocks += 1
        return slot

    def read(self, digest: bytes) -> int:
        """The slot of a block that the next step copies in; it is not given to another before."""
        slot = self._slots[digest]
        self.touch([digest])
        self._read_by_next_step.add(slot)
        self.stats.num_moved_in_blocks += 1
        return slot

    def touch(self, digests: Iterable[bytes]) -> None:
        """Count blocks as used just now, as far as they are here."""
        for digest in digests:
            if digest in self._slots:
                self._slots.move_to_end(digest)
            if digest in self._unclean:
                self._unclean.move_to_end(digest)

    def step_planned(self) -> None:
        """Note that a step with all reads so far has been planned: its slots may be written by later ones."""
        self._read_by_next_step.clear()

    def landed(self, slots: Iterable[int]) -> None:
        """A step that copied to these slots has a result."""
        for slot in slots:
            self._unlanded[slot] -= 1
            if self._unlanded[slot] <= 0:
                del self._unlanded[slot]

    def discard(self, digest: bytes) -> None:
        """Forget a block, because what is in its slot cannot be trusted."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._unclean.pop(digest, None)
            self._free.append(slot)

    def discard_slots(self, slots: Collection[int]) -> None:
        """Forget the blocks in these slots, likewise."""
        for digest in [digest for digest, slot in self._slots.items() if slot in slots]:
            self.discard(digest)

    def _take_oldest(self, *, has_landed: bool = False, keep: Collection[bytes] = ()) -> int | None:
        """The slot of the oldest block, or of one that is almost as old and clean. `has_landed`: no step in flight may
        copy to it. Not those that are held, nor those of `keep`."""
        unclean = None
        for num_looks, (digest, slot) in enumerate(self._slots.items()):
            is_unlanded = has_landed and slot in self._unlanded
            if is_unlanded or slot in self._read_by_next_step or digest in self._storing:
                continue
            if digest in self._held or digest in keep:
                continue
            if digest not in self._unclean:
                return self._forget(digest)
            unclean = digest if unclean is None else unclean
            if num_looks >= _NUM_CLEAN_LOOKS:
                break
        if unclean is None:
            return None
        self.stats.num_dropped_blocks += 1
        self.stats.num_unstored_blocks += 1
        return self._forget(unclean)

    def _forget(self, digest: bytes) -> int:
        self._unclean.pop(digest, None)
        return self._slots.pop(digest)

    # ---- further away ---------------------------------------------------------------------------------------------

    @property
    def num_fetching(self) -> int:
        """Slots that are being filled."""
        return len(self._fetching)

    @property
    def num_storing(self) -> int:
        """Slots that are being stored."""
        return len(self._storing)

    def is_fetching(self, digest: bytes) -> bool:
        """Whether it is on its way here."""
        return digest in self._fetching

    def hold(self, digests: Iterable[bytes]) -> None:
        """Keep blocks that are here, or on their way, until they are released as often."""
        self._held.update(digests)

    def release(self, digests: Iterable[bytes]) -> None:
        """Whoever held them needs them no more."""
        for digest in digests:
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]

    @property
    def held(self) -> Mapping[bytes, int]:
        """By how many each block is held."""
        return self._held

    @property
    def num_takeable(self) -> int:
        """Slots that are free, or whose blocks nobody holds."""
        return self.num_slots - len(self._fetching) - len(self._slots.keys() & self._held.keys())

    def fetch(self, digest: bytes, source: str, *, keep: Collection[bytes] = ()) -> bool:
        """Have a block fetched that is not here. False if no slot can be given up for it, without those of `keep`."""
        slot = self._take_landed(keep)
        if slot is None:
            return False
        self._fetching[digest] = (slot, source)
        self._fetches.append((digest, slot, source))
        return True

    def fetch_latest(self, most: int) -> list[bytes]:
        """Have blocks fetched from disk that nobody has asked for: those used last, the very last one first, as long as
        more than a quarter of the slots is free. Returns which."""
        if self.far is None:
            return []
        num_wanted = self.num_slots - self.num_slots // 4
        missing = [digest for digest in self.far.latest(num_wanted) if not self.is_fetching(digest)]
        missing = [digest for digest in missing if digest not in self._slots]
        num_free = num_wanted - (self.num_slots - len(self._free))
        return [digest for digest in missing[: max(min(most, num_free), 0)] if self.fetch(digest, "")]

    def note_latest(self, digests: Sequence[bytes]) -> None:
        """`fetch_latest` has had these fetched. That is no use: they stay in the order that they were in."""
        self.touch(reversed(digests))
        for digest in reversed(digests):
            if self.far is not None and digest in self.far:
                self.far.add(digest)

    def _take_landed(self, keep: Collection[bytes]) -> int | None:
        """A slot that no step in flight copies to."""
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place] not in self._unlanded:  # a failed step's slot may still be copied to by the next
                return self._free.pop(place)
        return self._take_oldest(has_landed=True, keep=keep)

    def fetch_done(self, digest: bytes, ok: bool, *, seconds: float = 0.0) -> None:
        """A fetch has ended: from now on the block is found, or its slot is free."""
        slot, source = self._fetching.pop(digest)
        if not ok:
            self.stats.num_failed_fetches += 1
            self._free.append(slot)
            if self.far is not None and not source:
                self.far.discard(digest)
            return
        self._slots[digest] = slot
        self.stats.num_fetched_blocks += 1
        self.stats.fetch_s += seconds
        if not source:  # of other replicas there are many addresses, and they are named because it is worth it
            self._num_timed += 1
            mean_s, weight = self.fetch_block_s.get(source, 0.0), max(_SMOOTHING, 1 / self._num_timed)
            self.fetch_block_s[source] = mean_s + weight * (seconds - mean_s)
        if self.far is None:
            return
        if not source:
            self.far.add(digest)
        elif digest not in self.far:
            self._unclean[digest] = None

    def is_worth_fetching(self, source: str, block_s: float) -> bool:
        """Whether a block comes sooner than within `block_s`. While that is not known, it is tried."""
        known_s = self.fetch_block_s.get(source, 0.0)
        if known_s < block_s:
            return True
        self.fetch_block_s[source] = known_s * _FADING
        return False

    def store_done(self, digest: bytes, ok: bool) -> None:
        """A block has been stored, or cannot be."""
        del self._storing[digest]
        if ok:
            self.stats.num_stored_blocks += 1
            if self.far is not None:
                self.far.add(digest)
        else:
            self.stats.num_unstored_blocks += 1

    def take_transfers(self) -> tuple[tuple[tuple[bytes, int, str], ...], tuple[tuple[bytes, int], ...]]:
        """Fetches and stores to be started, as in `BlockMoves`."""
        if len(self._free) < self.num_slots // 4 + 1:
            self.store_some(MAX_STORES)
        if not self._fetches and not self._stores:
            return (), ()
        transfers = tuple(self._fetches), tuple(self._stores)
        self._fetches.clear()
        self._stores.clear()
        return transfers

    def store_some(self, most: int) -> None:
        """Have the oldest blocks stored that are not on disk, until `most` are being stored."""
        for digest in list(self._unclean) if len(self._unclean) <= most else self._oldest_unclean(most):
            if len(self._storing) >= most:
                return
            if self._slots[digest] not in self._unlanded:
                del self._unclean[digest]
                self._storing[digest] = self._slots[digest]
                self._stores.append((digest, self._slots[digest]))

    def _oldest_unclean(self, most: int) -> list[bytes]:
        return [digest for digest, _ in zip(self._unclean, range(most), strict=False)]

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a slot is lost or taken twice."""
        slots = [*self._slots.values(), *self._free, *(slot for slot, _ in self._fetching.values())]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of the host tier is lost, or taken twice"
        assert not self._fetching.keys() & self._slots.keys(), "a block is fetched that is here"
        for digest, slot in self._storing.items():
            assert self._slots.get(digest) == slot, "a slot that is being stored has been given to another block"
        assert self._unclean.keys() <= self._slots.keys(), "a block is to be stored that is not here"
        assert not self._unclean.keys() & self._storing.keys(), "a block is stored twice"
        assert self.far is not None or not (self._unclean or self._storing), "blocks are stored nowhere"
        assert all(count > 0 for count in self._unlanded.values()), "a step has landed twice"
