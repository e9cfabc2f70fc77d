"""The scheduler and the cache again, written to be obviously right instead of fast.

`BruteForceScheduler` keeps plain lists, sorts everything every step and counts blocks by arithmetic. `SlotMemory` is
the KV memory as a runner sees it: it writes every computed token into its slot and checks that whatever a request reads
back is its own, also if another one had the same id before.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from headway.config import SchedulerConfig
from headway.core import SchedulerOutput
from headway.core.decode_pace import DecodePace


@dataclass(eq=False)
class Entry:
    name: str
    order: tuple[int, int]
    prompt: int
    limit: int
    output: int = 0
    pending: int = 0
    computed: int = 0
    reserved: int = 0
    skips: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output + self.pending

    @property
    def remaining(self) -> int:
        return min(self.tokens, self.limit - 1) - self.computed


@dataclass
class Step:
    tokens: dict[str, int] = field(default_factory=dict)
    sampling: list[Entry] = field(default_factory=list)
    limit: int = 0
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


class BruteForceScheduler:
    """States of all live requests in one list; `running` is a set of names."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
        self.pace = DecodePace(target_s=(config.target_itl_ms or 0) / 1e3, max_tokens=config.max_num_batched_tokens)
        self.entries: list[Entry] = []
        self.running: set[str] = set()

    def blocks(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def in_order(self, running: bool) -> list[Entry]:
        return sorted((e for e in self.entries if (e.name in self.running) == running), key=lambda e: e.order)

    def held(self, step: Step) -> int:
        """Blocks in use, counting what this step has already been given."""
        return sum(self.blocks(e.computed + step.tokens.get(e.name, 0)) for e in self.entries if e.name in self.running)

    def promised(self, step: Step) -> int:
        """Blocks that running requests will still need for the tokens they were admitted with."""
        return sum(
            max(0, e.reserved - self.blocks(e.computed + step.tokens.get(e.name, 0)))
            for e in self.entries
            if e.name in self.running
        )

    def schedule(self) -> Step:
        step = Step(limit=self.config.max_num_batched_tokens)
        for entry in [e for e in self.in_order(running=True) if e.remaining == 1]:
            self.compute(step, entry)
        chunks = [e for e in self.in_order(running=True) if e.remaining > 1]
        backlog = sum(e.remaining for e in chunks) + sum(e.tokens for e in self.in_order(running=False))
        num_decodes = len(step.tokens)
        allowance = self.pace.chunk_tokens(num_decodes=num_decodes, num_backlog_tokens=backlog)
        step.limit = min(step.limit, num_decodes + allowance)
        for entry in chunks:
            self.compute(step, entry)
        while not step.preempted and self.admit_one(step):
            pass
        for entry in self.entries:
            entry.computed += step.tokens.get(entry.name, 0)
            if entry.name in step.tokens and entry.computed == entry.tokens:
                entry.pending += 1
                step.sampling.append(entry)
        return step

    def left(self, step: Step) -> int:
        return step.limit - sum(step.tokens.values())

    def compute(self, step: Step, entry: Entry) -> None:
        if self.left(step) == 0 or entry.name not in self.running:
            return
        wanted = min(entry.remaining, self.left(step), self.config.max_chunk_tokens or 10**9)
        while entry.name in self.running:
            room = (self.num_blocks - self.held(step) + self.blocks(entry.computed)) * self.block_size - entry.computed
            if room > 0:
                step.tokens[entry.name] = min(wanted, room)
                return
            victim = self.in_order(running=True)[-1]
            self.running.discard(victim.name)
            victim.computed = 0
            step.tokens.pop(victim.name, None)
            step.preempted.append(victim.name)

    def admit_one(self, step: Step) -> bool:
        if self.left(step) == 0 or len(self.running) >= self.config.max_num_seqs:
            return False
        passed: list[Entry] = []
        for entry in self.in_order(running=False)[: self.config.skip_window + 1]:
            free = self.num_blocks - self.held(step) - self.promised(step) - len(self.running)
            if self.blocks(entry.tokens) <= free and entry.pending == 0:
                for other in passed:
                    other.skips += 1
                entry.skips = 0
                self.running.add(entry.name)
                entry.reserved = self.blocks(entry.tokens)
                step.admitted.append(entry.name)
                self.compute(step, entry)
                return True
            if entry.skips >= self.config.max_head_skips:
                return False
            passed.append(entry)
        return False

    def took(self, step: Step, duration_s: float) -> None:
        self.pace.observe(num_chunk_tokens=sum(step.tokens.values()) - len(step.tokens), duration_s=duration_s)

    def remove(self, name: str) -> None:
        self.entries = [e for e in self.entries if e.name != name]
        self.running.discard(name)

    def sampled(self, entry: Entry, *, is_stop: bool) -> bool:
        """Count one output token of a live entry; returns whether the request ended."""
        entry.pending -= 1
        entry.output += 1
        if is_stop or entry.prompt + entry.output >= entry.limit:
            self.remove(entry.name)
            return True
        return False


class SlotMemory:
    """What each slot of the KV cache holds: (stay, position), written and read as block tables say. A stay is the time
    from a request's entry into the batch until it leaves."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.tables: dict[str, list[int]] = {}
        self.stays: dict[str, int] = {}
        self.numbers = itertools.count()

    def run(self, output: SchedulerOutput) -> None:
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self.tables.pop(request_id, None)
        for new in output.new_requests:
            assert new.request_id not in self.tables, f"{new.request_id} enters twice"
            self.tables[new.request_id] = []
            self.stays[new.request_id] = next(self.numbers)
        for scheduled in output.scheduled:
            self.tables[scheduled.request_id].extend(scheduled.new_block_ids)
            stay = self.stays[scheduled.request_id]
            for position in range(scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_tokens):
                self.slots[self.slot(scheduled.request_id, position)] = (stay, position)
        for scheduled in output.scheduled:
            stay = self.stays[scheduled.request_id]
            for position in range(scheduled.num_computed_tokens + scheduled.num_tokens):
                found = self.slots[self.slot(scheduled.request_id, position)]
                assert found == (stay, position), f"{scheduled.request_id}@{position} reads {found}"

    def slot(self, request_id: str, position: int) -> int:
        return self.tables[request_id][position // self.block_size] * self.block_size + position % self.block_size
