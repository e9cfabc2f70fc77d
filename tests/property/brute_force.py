"""The scheduler and the cache again, written to be obviously right instead of fast.

`BruteForceScheduler` keeps plain lists, sorts everything every step and counts blocks by arithmetic. `SlotMemory` is
the KV memory as a runner sees it: it writes every computed token into its slot and checks that whatever a request reads
back is its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.config import SchedulerConfig
from headway.core import SchedulerOutput


@dataclass
class Entry:
    name: str
    order: tuple[int, int]
    prompt: int
    limit: int
    output: int = 0
    computed: int = 0
    reserved: int = 0
    skips: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


@dataclass
class Step:
    tokens: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


class BruteForceScheduler:
    """States of all live requests in one list; `running` is a set of names."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
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
        step = Step()
        for decodes in (True, False):
            for entry in [e for e in self.in_order(running=True) if (e.tokens - e.computed == 1) == decodes]:
                if entry.tokens > entry.computed:
                    self.compute(step, entry)
        while not step.preempted and self.admit_one(step):
            pass
        for name, tokens in step.tokens.items():
            next(e for e in self.entries if e.name == name).computed += tokens
        return step

    def left(self, step: Step) -> int:
        return self.config.max_num_batched_tokens - sum(step.tokens.values())

    def compute(self, step: Step, entry: Entry) -> None:
        if self.left(step) == 0:
            return
        wanted = min(entry.tokens - entry.computed, self.left(step), self.config.max_chunk_tokens or 10**9)
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
            if self.blocks(entry.tokens) <= free:
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

    def remove(self, name: str) -> None:
        self.entries = [e for e in self.entries if e.name != name]
        self.running.discard(name)

    def sampled(self, name: str, *, is_stop: bool) -> bool:
        """Count one output token; returns whether the request ended."""
        entry = next(e for e in self.entries if e.name == name)
        entry.output += 1
        if is_stop or entry.tokens >= entry.limit:
            self.remove(name)
            return True
        return False


class SlotMemory:
    """What each slot of the KV cache holds: (request, position), written and read as block tables say."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[str, int] | None] = [None] * (num_blocks * block_size)
        self.tables: dict[str, list[int]] = {}

    def run(self, output: SchedulerOutput) -> None:
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self.tables.pop(request_id, None)
        for new in output.new_requests:
            self.tables[new.request_id] = []
        for scheduled in output.scheduled:
            self.tables[scheduled.request_id].extend(scheduled.new_block_ids)
            for position in range(scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_tokens):
                self.slots[self.slot(scheduled.request_id, position)] = (scheduled.request_id, position)
        for scheduled in output.scheduled:
            for position in range(scheduled.num_computed_tokens + scheduled.num_tokens):
                found = self.slots[self.slot(scheduled.request_id, position)]
                assert found == (scheduled.request_id, position), f"{scheduled.request_id}@{position} reads {found}"

    def slot(self, request_id: str, position: int) -> int:
        return self.tables[request_id][position // self.block_size] * self.block_size + position % self.block_size
