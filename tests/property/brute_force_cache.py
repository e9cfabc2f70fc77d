"""The prefix cache again, written to be obviously right instead of fast.

What is cached is a plain list of prefixes: a salt and all tokens from the first one to the end of a block, no digests
and no tree. A prefix whose length is no multiple of the block size is a tail. Whose parent a prefix is, and whether it
is a leaf, is found by comparing tokens. The host tier is another list.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Prefix = tuple[str, tuple[int, ...]]


class BruteForceCache:
    """Knows what is cached and in which order it is given up; who uses it is told with each call."""

    def __init__(self, block_size: int, max_tails: int, num_host_slots: int = 0) -> None:
        self.block_size, self.max_tails, self.num_host_slots = block_size, max_tails, num_host_slots
        self.kept: list[Prefix] = []  # in the order in which they came
        self.idle: list[Prefix] = []  # of these, what nobody uses, longest unused first
        self.pinned_until: dict[Prefix, float] = {}
        self.on_their_way: dict[Prefix, str] = {}
        self.host: dict[Prefix, int] = {}  # what has left the device, and its slot; longest unused first
        self.free_host_slots = list(range(num_host_slots))  # the first is taken next
        self.read_now: list[Prefix] = []  # of these, what the step that is being planned copies in
        self.written_now: set[int] = set()  # and slots that it copies something into
        self.now = 0.0
        self.evicted: list[Prefix] = []
        self.num_queried = self.num_hits = self.num_tail_hits = self.num_waits = self.num_duplicates = 0
        self.num_inserted = self.num_evicted_pinned = self.num_restored = 0

    def full_blocks(self, salt: str, tokens: tuple[int, ...]) -> list[Prefix]:
        return [(salt, tokens[:end]) for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def parent(self, prefix: Prefix) -> Prefix:
        salt, tokens = prefix
        return (salt, tokens[: (len(tokens) - 1) // self.block_size * self.block_size])

    def is_leaf(self, prefix: Prefix) -> bool:
        return all(self.parent(other) != prefix for other in self.kept)

    def find(self, salt: str, tokens: tuple[int, ...]) -> list[Prefix]:
        found = []
        for prefix in self.full_blocks(salt, tokens):
            if prefix not in self.kept:
                break
            found.append(prefix)
        return found

    def tails(self, before: Prefix) -> list[Prefix]:
        return [p for p in self.kept if len(p[1]) % self.block_size and self.parent(p) == before]

    def find_tail(self, before: Prefix, tokens: tuple[int, ...]) -> tuple[Prefix | None, int]:
        """The tail that has most tokens in common with these, which begin at the same place; the oldest of equals."""
        best, most = None, 0
        for tail in self.tails(before):
            own = tail[1][len(before[1]) :]
            common = next((i for i, (a, b) in enumerate(zip(own, tokens)) if a != b), min(len(own), len(tokens)))
            if common > most:
                best, most = tail, common
        return best, most

    def insert(self, prefix: Prefix) -> bool:
        if prefix in self.kept:
            self.num_duplicates += 1
            return False
        self.kept.append(prefix)
        self.num_inserted += 1
        return True

    def insert_tail(self, prefix: Prefix) -> bool:
        tails = self.tails(self.parent(prefix))
        idle = [tail for tail in tails if tail in self.idle]
        if prefix in tails or (len(tails) >= self.max_tails and not idle):
            return False
        if len(tails) >= self.max_tails:
            self.remove(idle[0])
        self.kept.append(prefix)
        self.num_inserted += 1
        return True

    def remove(self, prefix: Prefix) -> None:
        self.kept.remove(prefix)
        self.pinned_until.pop(prefix, None)
        if prefix in self.idle:
            self.idle.remove(prefix)

    def use(self, prefix: Prefix) -> None:
        if prefix in self.idle:
            self.idle.remove(prefix)

    def let_go(self, prefix: Prefix, *, keep: bool) -> None:
        if keep or not self.is_leaf(prefix):
            self.idle.append(prefix)
        else:
            self.remove(prefix)

    def touch(self, prefix: Prefix) -> None:
        if prefix in self.idle:
            self.idle.remove(prefix)
            self.idle.append(prefix)

    def pin(self, prefix: Prefix, seconds: float) -> None:
        self.pinned_until[prefix] = max(self.pinned_until.get(prefix, 0.0), self.now + seconds)

    def is_pinned(self, prefix: Prefix) -> bool:
        return self.pinned_until.get(prefix, 0.0) > self.now

    def evict(self) -> None:
        parents = {self.parent(prefix) for prefix in self.kept}
        leaves = [prefix for prefix in self.idle if prefix not in parents]
        victim = next((prefix for prefix in leaves if not self.is_pinned(prefix)), leaves[0])
        self.num_evicted_pinned += self.is_pinned(victim)
        self.remove(victim)
        self.evicted.append(victim)
        if self.num_host_slots and len(victim[1]) % self.block_size == 0:
            self.move_out(victim)

    def find_on_host(self, prefixes: Iterable[Prefix]) -> list[Prefix]:
        return list(itertools.takewhile(lambda prefix: prefix in self.host, prefixes))

    def move_out(self, prefix: Prefix) -> None:
        """What is there already is as good as new; otherwise the oldest makes way that this step does not read."""
        if prefix in self.host:
            self.host[prefix] = self.host.pop(prefix)
            return
        if not self.free_host_slots:
            unread = [old for old in self.host if old not in self.read_now]
            if not unread:
                return
            self.free_host_slots = [self.host.pop(unread[0])]
        self.host[prefix] = self.free_host_slots.pop(0)
        self.written_now.add(self.host[prefix])

    def distrust(self, slots: set[int]) -> None:
        for prefix in [prefix for prefix, slot in self.host.items() if slot in slots]:
            self.free_host_slots.insert(0, self.host.pop(prefix))

    def read(self, prefix: Prefix) -> None:
        self.host[prefix] = self.host.pop(prefix)
        self.read_now.append(prefix)
        self.num_restored += 1

    def announce(self, prefixes: Iterable[Prefix], name: str) -> None:
        for prefix in prefixes:
            if prefix not in self.kept:
                self.on_their_way.setdefault(prefix, name)

    def withdraw(self, name: str) -> None:
        self.on_their_way = {prefix: who for prefix, who in self.on_their_way.items() if who != name}
