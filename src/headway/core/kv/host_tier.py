"""Host memory for blocks: a fixed number of slots, found by the digests of the blocks in them.

    device   in use ──► kept (idle) ──► evicted
                ▲                          │ copied out, before the block is written again
                │ copied in                ▼
    host        └───────────────────── a slot of the tier ──► forgotten, the slot that was used longest ago first
                                           │  ▲
                                    stored ▼  │ fetched
    remote                        a folder on disk, or another replica

A block that has a slot is in one of three states:

    fetching ──► on host ◄──► prefetched        copied to the device, too, for requests that wait for others still

Only bookkeeping is here: which digest is in which slot. The runner copies the bytes between device and host, in the
order of the plan. Fetches and stores run beside the steps: until one is done, its slot is not given to others, and a
slot that is being filled is not found.

What is on disk already, or could not be stored, is clean: it can be forgotten at once. Once slots become scarce, those
that are dirty are stored, the oldest first, before they are needed; if that is too slow, blocks are dropped.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated

from headway.core.kv.disk_index import DiskIndex
from headway.counters import Counter, Gauge, Statistics

MAX_STORES = 64
"""Blocks that are being stored at the same time."""
_NUM_CLEAN_LOOKS = 64  # of the oldest blocks, to find a clean one


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


class PartState(enum.Enum):
    """Where a block with a slot is."""

    FETCHING = "fetching"
    """Its slot is being filled from disk, or from another replica."""
    ON_HOST = "on host"
    PREFETCHED = "prefetched"
    """On the host, and in a device block of its own that no request uses yet."""


_FETCHING, _ON_HOST, _PREFETCHED = PartState.FETCHING, PartState.ON_HOST, PartState.PREFETCHED


class HostedPart:
    """A block that has a slot."""

    __slots__ = ("is_storing", "slot", "source", "state")

    def __init__(self, slot: int, state: PartState, *, source: str = "") -> None:
        self.slot = slot
        self.state = state
        self.source = source  # where it is fetched from, as in `BlockMoves`
        self.is_storing = False  # its slot is being read


class HostTier:
    """The slots."""

    def __init__(self, num_slots: int, *, disk: DiskIndex | None = None) -> None:
        """`disk`: what is known of it; without one nothing is stored."""
        if num_slots < 1:
            raise ValueError(f"a host tier needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self.disk = disk
        self.stats = HostTierStats()
        self.num_fetching = 0
        """Slots that are being filled."""
        self.num_storing = 0
        """Slots that are being stored."""
        self._parts: OrderedDict[bytes, HostedPart] = OrderedDict()  # the one used longest ago first
        self._dirty: OrderedDict[bytes, None] = OrderedDict()  # of these: what has to be stored, in the same order
        self._free = list(range(num_slots - 1, -1, -1))
        self._read_by_next_step: set[int] = set()
        self._being_copied = collections.Counter[int]()  # slots, by how many steps in flight copy to them
        self._pins = collections.Counter[bytes]()
        self._fetches: list[tuple[bytes, int, str]] = []  # these two as in `BlockMoves`, to be taken
        self._stores: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        """Blocks that are here."""
        return self.num_slots - len(self._free) - self.num_fetching

    def __contains__(self, digest: bytes) -> bool:
        part = self._parts.get(digest)
        return part is not None and part.state is not _FETCHING

    def __iter__(self) -> Iterator[bytes]:
        """What was used longest ago comes first."""
        return (digest for digest, part in self._parts.items() if part.state is not _FETCHING)

    def state_of(self, digest: bytes) -> PartState | None:
        """`None`: it has no slot."""
        part = self._parts.get(digest)
        return None if part is None else part.state

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """How much of a chain is here, from its first block on."""
        return list(itertools.takewhile(self.__contains__, digests))

    def slot_of(self, digest: bytes) -> int | None:
        """Where a block is, if its bytes are there: no step that copies them is in flight."""
        if digest not in self:
            return None
        slot = self._parts[digest].slot
        return None if slot in self._being_copied else slot

    def put(self, digest: bytes) -> int | None:
        """Take a slot for a block that is about to be evicted. `None` if it is here already or about to be, or no slot
        can be given up."""
        if digest in self._parts:
            self.touch([digest])
            return None
        slot = self._free.pop() if self._free else self._take_oldest()
        if slot is None:
            return None
        self._parts[digest] = HostedPart(slot, _ON_HOST)
        self._being_copied[slot] += 1
        if self.disk is not None and digest not in self.disk:
            self._dirty[digest] = None
        self.stats.num_moved_out_blocks += 1
        return slot

    def read(self, digest: bytes) -> int:
        """The slot of a block that the next step copies in; it is not given to another before."""
        slot = self._parts[digest].slot
        self.touch([digest])
        self._read_by_next_step.add(slot)
        self.stats.num_moved_in_blocks += 1
        return slot

    def touch(self, digests: Iterable[bytes]) -> None:
        """Count blocks as used just now, as far as they are here."""
        for digest in digests:
            if digest in self._parts:
                self._parts.move_to_end(digest)
            if digest in self._dirty:
                self._dirty.move_to_end(digest)

    def step_planned(self) -> None:
        """Note that a step with all reads so far has been planned: its slots may be written by later ones."""
        self._read_by_next_step.clear()

    def copied_out(self, slots: Iterable[int]) -> None:
        """A step that copied to these slots has a result."""
        for slot in slots:
            self._being_copied[slot] -= 1
            if self._being_copied[slot] <= 0:
                del self._being_copied[slot]

    def discard(self, slots: Collection[int]) -> None:
        """Forget the blocks in these slots, because what is in them cannot be trusted."""
        for digest in [digest for digest in self if self._parts[digest].slot in slots]:
            self._free.append(self._forget(digest))

    def _take_oldest(self, *, is_still: bool = False, keep: Collection[bytes] = ()) -> int | None:
        """The slot of the oldest block, or of one that is almost as old and clean. `is_still`: no step in flight may
        copy to it. Not those that are pinned, nor those of `keep`."""
        oldest_dirty = None
        for num_looks, (digest, part) in enumerate(self._parts.items()):
            if part.state is _FETCHING or part.is_storing or part.slot in self._read_by_next_step:
                continue
            if digest in self._pins or digest in keep or (is_still and part.slot in self._being_copied):
                continue
            if digest not in self._dirty:
                return self._forget(digest)
            oldest_dirty = digest if oldest_dirty is None else oldest_dirty
            if num_looks >= _NUM_CLEAN_LOOKS:
                break
        if oldest_dirty is None:
            return None
        self.stats.num_dropped_blocks += 1
        self.stats.num_unstored_blocks += 1
        return self._forget(oldest_dirty)

    def _forget(self, digest: bytes) -> int:
        self._dirty.pop(digest, None)
        return self._parts.pop(digest).slot

    # ---- blocks for requests that wait ----------------------------------------------------------------------------

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep blocks that are here, or on their way, until each of these pins is taken back."""
        self._pins.update(digests)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """A request that had them pinned has them, or does not need them."""
        for digest in digests:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    @property
    def pins(self) -> Mapping[bytes, int]:
        """How many requests each block is pinned for."""
        return self._pins

    @property
    def num_takeable(self) -> int:
        """Slots that are free, or whose blocks are not pinned."""
        return self.num_slots - self.num_fetching - sum(digest in self for digest in self._pins)

    def mark_prefetched(self, digest: bytes, *, is_prefetched: bool) -> None:
        """A block that is here is on the device, too, for requests that wait; or is not any more."""
        self._parts[digest].state = _PREFETCHED if is_prefetched else _ON_HOST

    # ---- disk and other replicas ----------------------------------------------------------------------------------

    def fetch(self, digest: bytes, source: str, *, keep: Collection[bytes] = ()) -> bool:
        """Have a block fetched that is not here. False if no slot can be given up for it, without those of `keep`."""
        slot = self._take_still(keep)
        if slot is None:
            return False
        self._parts[digest] = HostedPart(slot, _FETCHING, source=source)
        self.num_fetching += 1
        self._fetches.append((digest, slot, source))
        return True

    def _take_still(self, keep: Collection[bytes]) -> int | None:
        """A slot that no step in flight copies to."""
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place] not in self._being_copied:  # as a failed step's slot may be
                return self._free.pop(place)
        return self._take_oldest(is_still=True, keep=keep)

    def fetch_done(self, digest: bytes, ok: bool, *, seconds: float = 0.0) -> None:
        """A fetch has ended: from now on the block is found, or its slot is free."""
        part = self._parts[digest]
        self.num_fetching -= 1
        if not ok:
            self.stats.num_failed_fetches += 1
            self._free.append(self._forget(digest))
            if self.disk is not None and not part.source:
                self.disk.discard(digest)
            return
        part.state = _ON_HOST
        self._parts.move_to_end(digest)
        self.stats.num_fetched_blocks += 1
        self.stats.fetch_s += seconds
        if self.disk is None:
            return
        if not part.source:
            self.disk.note_fetched(seconds)
            self.disk.add(digest)
        elif digest not in self.disk:
            self._dirty[digest] = None

    def store_done(self, digest: bytes, ok: bool) -> None:
        """A block has been stored, or cannot be."""
        self._parts[digest].is_storing = False
        self.num_storing -= 1
        if ok:
            self.stats.num_stored_blocks += 1
            if self.disk is not None:
                self.disk.add(digest)
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
        for digest in list(itertools.islice(self._dirty, most)):
            if self.num_storing >= most:
                return
            part = self._parts[digest]
            if part.slot not in self._being_copied:
                del self._dirty[digest]
                part.is_storing = True
                self.num_storing += 1
                self._stores.append((digest, part.slot))

    def num_free_above(self, num_kept: int) -> int:
        """Free slots beyond the first `num_kept`."""
        return max(len(self._free) - num_kept, 0)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a slot is lost or taken twice."""
        parts = self._parts
        slots = [*(part.slot for part in parts.values()), *self._free]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of the host tier is lost, or taken twice"
        fetching = [digest for digest, part in parts.items() if part.state is _FETCHING]
        storing = [digest for digest, part in parts.items() if part.is_storing]
        assert (len(fetching), len(storing)) == (self.num_fetching, self.num_storing), "transfers are counted wrongly"
        assert not set(fetching) & {*storing, *self._dirty}, "a block is stored that has not come"
        assert self._dirty.keys() <= parts.keys(), "a block is to be stored that is not here"
        assert not self._dirty.keys() & set(storing), "a block is stored twice"
        assert self.disk is not None or not (self._dirty or storing), "blocks are stored nowhere"
        assert all(count > 0 for count in self._being_copied.values()), "a step has landed twice"
        assert all(count > 0 for count in self._pins.values()), "a block is unpinned too often"
