"""The host tier: a fixed number of slots for blocks in host memory, found by the digests of the blocks in them.

    device   in use ──► kept (idle) ──► evicted
                ▲                          │ copied out, before the block is written again
                │ copied in                ▼
    host        └───────────────────── a slot of the tier ──► forgotten, least recently used first
                                           │  ▲
                                    stored ▼  │ fetched
    remote                        a folder on disk, or another replica

A block that has a slot is in one of three states:

    fetching ──► on host ◄──► prefetched        also copied to the device, for requests that still wait for others

Only the bookkeeping is here: which digest is in which slot. The runner copies the bytes between device and host, in the
order of the plan. Fetches and stores run in parallel to the steps. Until one is done, its slot is not reused, and a
block that is being fetched is not found.

A block that is on disk already, or could not be stored, is clean: its slot can be reused at once. When slots become
scarce, dirty blocks are stored in advance, oldest first. If that is too slow, blocks are dropped.
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
"""The most blocks that are being stored at the same time."""
_NUM_CLEAN_LOOKS = 64  # how many of the oldest blocks are searched for a clean one


class HostTierStats(Statistics):
    """Counts blocks in host memory and on disk, and their transfers between these and the device."""

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
    """The sum over all fetches, also those that overlapped."""
    num_stored_blocks: Annotated[int, Counter("kv_blocks_stored", "KV blocks written to disk.")] = 0
    num_unstored_blocks: Annotated[
        int, Counter("kv_blocks_not_stored", "KV blocks that could not be written to disk.")
    ] = 0
    num_dropped_blocks: Annotated[int, Counter()] = 0
    """Blocks that were not stored because they left host memory before their turn; a part of `num_unstored_blocks`."""

    @property
    def num_failed_stores(self) -> int:
        return self.num_unstored_blocks - self.num_dropped_blocks


class PartState(enum.Enum):
    """The state of a block that has a slot."""

    FETCHING = "fetching"
    """Its slot is being filled from disk, or from another replica."""
    ON_HOST = "on host"
    PREFETCHED = "prefetched"
    """It is in host memory, and also in a device block that no request uses yet."""


_FETCHING, _ON_HOST, _PREFETCHED = PartState.FETCHING, PartState.ON_HOST, PartState.PREFETCHED


class HostedPart:
    """A block that has a slot, with its state."""

    __slots__ = ("is_storing", "slot", "source", "state")

    def __init__(self, slot: int, state: PartState, *, source: str = "") -> None:
        self.slot = slot
        self.state = state
        self.source = source  # where it is fetched from, as in `BlockMoves`
        self.is_storing = False  # its slot is being written to disk


class HostTier:
    """The slots of host memory, and the transfers that fill and store them."""

    def __init__(self, num_slots: int, *, disk: DiskIndex | None = None) -> None:
        """Create empty slots. `disk` is the index of blocks on disk; without it nothing is stored."""
        if num_slots < 1:
            raise ValueError(f"a host tier needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self.disk = disk
        self.stats = HostTierStats()
        self.num_fetching = 0
        """How many slots are being filled."""
        self.num_storing = 0
        """How many slots are being written to disk."""
        self._parts: OrderedDict[bytes, HostedPart] = OrderedDict()  # least recently used first
        self._dirty: OrderedDict[bytes, None] = OrderedDict()  # the blocks that have to be stored, in the same order
        self._free = list(range(num_slots - 1, -1, -1))
        self._read_by_next_step: set[int] = set()
        self._being_copied = collections.Counter[int]()  # how many steps in flight copy to each slot
        self._pins = collections.Counter[bytes]()
        self._fetches: list[tuple[bytes, int, str]] = []  # not started yet; both lists are as in `BlockMoves`
        self._stores: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        """The number of blocks that are in host memory."""
        return self.num_slots - len(self._free) - self.num_fetching

    def __contains__(self, digest: bytes) -> bool:
        part = self._parts.get(digest)
        return part is not None and part.state is not _FETCHING

    def __iter__(self) -> Iterator[bytes]:
        """The digests of the blocks in host memory, least recently used first."""
        return (digest for digest, part in self._parts.items() if part.state is not _FETCHING)

    def state_of(self, digest: bytes) -> PartState | None:
        """Return the state of a block; `None` if it has no slot."""
        part = self._parts.get(digest)
        return None if part is None else part.state

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the first blocks of a chain, up to the first one that is not in host memory."""
        return list(itertools.takewhile(self.__contains__, digests))

    def slot_of(self, digest: bytes) -> int | None:
        """Return the slot of a block if its bytes are there; `None` while a step in flight still copies them."""
        if digest not in self:
            return None
        slot = self._parts[digest].slot
        return None if slot in self._being_copied else slot

    def put(self, digest: bytes) -> int | None:
        """Take a slot for a block that is about to be evicted. Returns `None` if the block has a slot already, or if no
        slot can be freed."""
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
        """Return the slot of a block that the next step copies in. The slot is not reused before that."""
        slot = self._parts[digest].slot
        self.touch([digest])
        self._read_by_next_step.add(slot)
        self.stats.num_moved_in_blocks += 1
        return slot

    def touch(self, digests: Iterable[bytes]) -> None:
        """Count blocks as used just now; those without a slot are ignored."""
        for digest in digests:
            if digest in self._parts:
                self._parts.move_to_end(digest)
            if digest in self._dirty:
                self._dirty.move_to_end(digest)

    def step_planned(self) -> None:
        """Note that the step with all reads so far has been planned, so that later steps may write to their slots."""
        self._read_by_next_step.clear()

    def copied_out(self, slots: Iterable[int]) -> None:
        """Note that a step that copied to these slots has a result."""
        for slot in slots:
            self._being_copied[slot] -= 1
            if self._being_copied[slot] <= 0:
                del self._being_copied[slot]

    def discard(self, slots: Collection[int]) -> None:
        """Forget the blocks in these slots, because their contents cannot be trusted."""
        for digest in [digest for digest in self if self._parts[digest].slot in slots]:
            self._free.append(self._forget(digest))

    def forget_idle(self) -> int:
        """Forget the blocks that are neither needed by a request or the next step nor being stored. Returns how many
        there were."""
        idle = [
            digest
            for digest, part in self._parts.items()
            if part.state is _ON_HOST
            and not part.is_storing
            and part.slot not in self._read_by_next_step
            and digest not in self._pins
        ]
        self._free += [self._forget(digest) for digest in idle]
        return len(idle)

    def _take_oldest(self, *, is_still: bool = False, keep: Collection[bytes] = ()) -> int | None:
        """Forget the oldest block, or a clean one that is almost as old, and return its slot; `None` if there is none.
        Pinned blocks and those of `keep` stay. `is_still`: no step in flight may copy to the slot."""
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
        """Keep blocks that are in host memory or being fetched, until each of these pins is removed."""
        self._pins.update(digests)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Remove one pin of each of these blocks."""
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
        """How many slots are free or hold blocks that are not pinned."""
        return self.num_slots - self.num_fetching - sum(digest in self for digest in self._pins)

    def mark_prefetched(self, digest: bytes, *, is_prefetched: bool) -> None:
        """Note whether a block in host memory is also on the device for requests that wait."""
        self._parts[digest].state = _PREFETCHED if is_prefetched else _ON_HOST

    # ---- disk and other replicas ----------------------------------------------------------------------------------

    def fetch(self, digest: bytes, source: str, *, keep: Collection[bytes] = ()) -> bool:
        """Plan to fetch a block that has no slot. Returns False if no slot can be freed; blocks of `keep` stay."""
        slot = self._take_still(keep)
        if slot is None:
            return False
        self._parts[digest] = HostedPart(slot, _FETCHING, source=source)
        self.num_fetching += 1
        self._fetches.append((digest, slot, source))
        return True

    def _take_still(self, keep: Collection[bytes]) -> int | None:
        """Take a slot that no step in flight copies to; `None` if there is none."""
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place] not in self._being_copied:  # as a failed step's slot may be
                return self._free.pop(place)
        return self._take_oldest(is_still=True, keep=keep)

    def fetch_done(self, digest: bytes, ok: bool, *, seconds: float = 0.0) -> None:
        """Note that a fetch has ended. If `ok`, the block is found from now on; otherwise its slot is free."""
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
        """Note that a block has been stored, or that storing it has failed."""
        self._parts[digest].is_storing = False
        self.num_storing -= 1
        if ok:
            self.stats.num_stored_blocks += 1
            if self.disk is not None:
                self.disk.add(digest)
        else:
            self.stats.num_unstored_blocks += 1

    def take_transfers(self) -> tuple[tuple[tuple[bytes, int, str], ...], tuple[tuple[bytes, int], ...]]:
        """Return the fetches and stores to start now, as in `BlockMoves`."""
        if len(self._free) < self.num_slots // 4 + 1:
            self.store_some(MAX_STORES)
        if not self._fetches and not self._stores:
            return (), ()
        transfers = tuple(self._fetches), tuple(self._stores)
        self._fetches.clear()
        self._stores.clear()
        return transfers

    def store_some(self, most: int) -> None:
        """Plan to store the oldest blocks that are not on disk, until `most` are being stored."""
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
        """How many slots are free if `num_kept` of the free ones are kept back."""
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
