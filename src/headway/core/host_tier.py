"""Blocks that had to leave the device and stay in host memory, found again by their digests.

    device   in use ──► kept (idle) ──► evicted
                ▲                          │ copied out, before the block is written again
                │ copied in                ▼
    host        └───────────────────── a slot of the tier ──► forgotten, the slot that was used longest ago first

Only bookkeeping is here: which digest is in which slot. The runner copies the bytes, in the order of the plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class HostTierStats:
    """Counts since the start, in blocks."""

    num_moved_out: int = 0
    num_moved_in: int = 0
    num_forgotten: int = 0


class HostTier:
    """A fixed number of slots, each for one full block."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a host tier needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self.stats = HostTierStats()
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the one used longest ago first
        self._free = list(range(num_slots - 1, -1, -1))
        self._read_by_next_step: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """How much of a chain is here, from its first block on."""
        found = []
        for digest in digests:
            if digest not in self._slots:
                break
            found.append(digest)
        return found

    def put(self, digest: bytes) -> int | None:
        """Take a slot for a block that is about to be evicted. `None` if it is here already, or every slot is about to
        be read."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return None
        slot = self._free.pop() if self._free else self._take_oldest()
        if slot is None:
            return None
        self._slots[digest] = slot
        self.stats.num_moved_out += 1
        return slot

    def read(self, digest: bytes) -> int:
        """The slot of a block that the next step copies in; it is not given to another before."""
        slot = self._slots[digest]
        self._slots.move_to_end(digest)
        self._read_by_next_step.add(slot)
        self.stats.num_moved_in += 1
        return slot

    def step_planned(self) -> None:
        """Note that a step with all reads so far has been planned: its slots may be written by later ones."""
        self._read_by_next_step.clear()

    def discard(self, digest: bytes) -> None:
        """Forget a block, because what is in its slot cannot be trusted."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._free.append(slot)

    def discard_slots(self, slots: Collection[int]) -> None:
        """Forget the blocks in these slots, likewise."""
        for digest in [digest for digest, slot in self._slots.items() if slot in slots]:
            self.discard(digest)

    def _take_oldest(self) -> int | None:
        for digest, slot in self._slots.items():
            if slot not in self._read_by_next_step:
                del self._slots[digest]
                self.stats.num_forgotten += 1
                return slot
        return None

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a slot is lost or taken twice."""
        slots = [*self._slots.values(), *self._free]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of the host tier is lost, or taken twice"
