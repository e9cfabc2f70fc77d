"""The scheduler again, written to be obviously right instead of fast: plain lists, everything sorted every step, blocks
counted by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.config import SchedulerConfig
from headway.core.decode_pace import DecodePace
from tests.property.brute_force_cache import BruteForceCache, Prefix


@dataclass(eq=False)
class Entry:
    name: str
    order: tuple[int, int]
    prompt: tuple[int, ...]
    limit: int
    salt: str = ""
    ttl: float = 0.0
    reads: bool = True
    output: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    reserved: int = 0
    skips: int = 0
    stay: int = 0
    """How often it has entered the batch."""
    came_with: int = 0
    """Tokens that it had then."""
    landed: int = 0
    """Tokens that steps of this stay have computed, and their results have come."""
    preemptions: int = 0
    shared: list[Prefix] = field(default_factory=list)
    """Its first blocks, as far as they are cached."""
    tail: Prefix | None = None
    """What is cached of its last block, if that is not full."""

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.output) + self.pending

    @property
    def remaining(self) -> int:
        return min(self.tokens, self.limit - 1) - self.computed


@dataclass(frozen=True)
class Share:
    entry: Entry
    stay: int
    start: int
    end: int
    samples: bool


@dataclass
class Step:
    tokens: dict[str, int] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    limit: int = 0
    admitted: list[tuple[str, int]] = field(default_factory=list)
    """(name, tokens that were found in the cache)"""
    preempted: list[str] = field(default_factory=list)
    host_slots: set[int] = field(default_factory=set)
    """Where it copies what leaves the device."""

    @property
    def sampling(self) -> list[Entry]:
        return [share.entry for share in self.shares if share.samples]


class BruteForceScheduler:
    """States of all live requests in one list; `running` is a set of names."""

    def __init__(
        self, config: SchedulerConfig, num_blocks: int, block_size: int, cache: BruteForceCache | None = None
    ) -> None:
        self.config, self.num_blocks, self.block_size, self.cache = config, num_blocks, block_size, cache
        self.pace = DecodePace(target_s=(config.target_itl_ms or 0) / 1e3, max_tokens=config.max_num_batched_tokens)
        self.restore_block_s = 0.0
        self.entries: list[Entry] = []
        self.running: set[str] = set()

    def blocks(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def in_order(self, running: bool) -> list[Entry]:
        return sorted((e for e in self.entries if (e.name in self.running) == running), key=lambda e: e.order)

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def held(self, step: Step) -> int:
        """Blocks in use, counting what this step has already been given; one that is shared counts once."""
        running = [entry for entry in self.entries if entry.name in self.running]
        shared = {prefix for entry in running for prefix in entry.shared}
        return len(shared) + sum(self.blocks(e.computed + step.tokens.get(e.name, 0)) - len(e.shared) for e in running)

    def promised(self, step: Step) -> int:
        """Blocks that running requests will still need for the tokens they were admitted with."""
        return sum(
            max(0, e.reserved - self.blocks(e.computed + step.tokens.get(e.name, 0)))
            for e in self.entries
            if e.name in self.running
        )

    def make_free(self, step: Step, num_blocks: int) -> None:
        """Evict until so many blocks are neither used nor cached."""
        while self.cache is not None and self.num_blocks - self.held(step) - len(self.cache.idle) < num_blocks:
            self.cache.evict()

    # ---- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> Step:
        if self.cache is not None:
            self.cache.now, self.cache.read_now, self.cache.written_now = now, [], set()
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
        by_name = {entry.name: entry for entry in self.entries}
        for name, num_tokens in step.tokens.items():
            entry = by_name[name]
            start, entry.computed = entry.computed, entry.computed + num_tokens
            samples = entry.computed == entry.tokens
            entry.pending += samples
            step.shares.append(Share(entry, entry.stay, start, entry.computed, samples))
        step.host_slots = set() if self.cache is None else self.cache.written_now
        return step

    def left(self, step: Step) -> int:
        return step.limit - sum(step.tokens.values())

    def compute(self, step: Step, entry: Entry) -> None:
        if self.left(step) == 0 or entry.name not in self.running:
            return
        wanted = min(entry.remaining, self.left(step), self.config.max_chunk_tokens or 10**9)
        while entry.name in self.running:
            own = self.blocks(entry.computed)
            room = (self.num_blocks - self.held(step) + own) * self.block_size - entry.computed
            if room > 0:
                given = min(wanted, room)
                self.make_free(step, self.blocks(entry.computed + given) - own)
                step.tokens[entry.name] = given
                return
            running = self.in_order(running=True)
            victim = ([e for e in running if e.preemptions < self.config.max_preemptions] or running)[-1]
            step.tokens.pop(victim.name, None)
            self.leave(victim, keep=True)
            victim.preemptions += 1
            step.preempted.append(victim.name)

    def admit_one(self, step: Step) -> bool:
        if self.left(step) == 0 or len(self.running) >= self.config.max_num_seqs:
            return False
        passed: list[Entry] = []
        for entry in self.in_order(running=False)[: self.config.skip_window + 1]:
            if self.should_wait(entry):
                passed.append(entry)
                continue
            found = self.find(entry)
            revived = 0 if self.cache is None else sum(prefix in self.cache.idle for prefix in found)
            free = self.num_blocks - self.held(step) - self.promised(step) - len(self.running) - revived
            if self.blocks(entry.tokens) - len(found) <= free and entry.pending == 0:
                for other in passed:
                    other.skips += 1
                self.admit(step, entry)
                return True
            if entry.skips >= self.config.max_head_skips:
                return False
            passed.append(entry)
        return False

    def admit(self, step: Step, entry: Entry) -> None:
        entry.skips = 0
        entry.stay += 1
        entry.came_with, entry.landed = entry.tokens, 0
        entry.reserved = self.blocks(entry.tokens)
        if self.cache is not None:
            self.start_from_cache(step, entry, self.cache)
        self.running.add(entry.name)
        step.admitted.append((entry.name, entry.computed))
        self.compute(step, entry)

    # ---- the prefix cache -----------------------------------------------------------------------------------------

    def find(self, entry: Entry) -> list[Prefix]:
        """The cached blocks that an entry could begin with: never all its tokens, since one must be computed."""
        return self.cache.find(entry.salt, entry.known[:-1]) if self.cache is not None and entry.reads else []

    def should_wait(self, entry: Entry) -> bool:
        if self.cache is None or not entry.reads:
            return False
        wanted = self.cache.full_blocks(entry.salt, entry.known[:-1])
        missing = wanted[len(self.find(entry)) :]
        waits = bool(missing) and missing[0] in self.cache.on_their_way
        self.cache.num_waits += waits
        return waits

    def start_from_cache(self, step: Step, entry: Entry, cache: BruteForceCache) -> None:
        entry.shared = self.find(entry)
        entry.computed = len(entry.shared) * self.block_size
        for prefix in entry.shared:
            cache.use(prefix)
            if entry.ttl and len(prefix[1]) <= len(entry.prompt):
                cache.pin(prefix, entry.ttl)
        self.running.add(entry.name)
        if entry.reads:
            self.restore(step, entry, cache)
            rest = entry.known[entry.computed : -1]
            tail, num_equal = cache.find_tail((entry.salt, entry.known[: entry.computed]), rest)
            if tail is not None:
                cache.touch(tail)
                self.make_free(step, 1)
                entry.computed += num_equal
                cache.num_tail_hits += 1
            cache.num_queried += entry.tokens
        cache.num_hits += entry.computed
        cache.announce(cache.full_blocks(entry.salt, entry.known)[entry.computed // self.block_size :], entry.name)

    def restore(self, step: Step, entry: Entry, cache: BruteForceCache) -> None:
        wanted = cache.full_blocks(entry.salt, entry.known[:-1])[len(entry.shared) :]
        found = cache.find_on_host(wanted)
        if found and self.is_restoring_faster(entry, len(found)):
            for prefix in found:
                cache.read(prefix)
            self.make_free(step, len(found))
            entry.computed += len(found) * self.block_size

    def is_restoring_faster(self, entry: Entry, num_blocks: int) -> bool:
        if entry.preemptions and self.config.preemption_mode != "auto":
            return self.config.preemption_mode == "swap"
        token_s = self.pace.step_time.per_token_s
        return token_s is None or self.restore_block_s < self.block_size * token_s

    def keep(self, share: Share) -> None:
        """A share has been computed for sure. Of what its request came with, full blocks are cached, those that came
        from the host once all is there or another block has been filled; and the tail of a prompt that is complete."""
        entry = share.entry
        if entry not in self.entries or entry.name not in self.running or entry.stay != share.stay:
            return
        entry.landed = share.end
        fills_block = share.end // self.block_size > share.start // self.block_size
        is_prompt_complete = share.end == len(entry.prompt)
        is_all = share.start < entry.came_with == share.end
        if (fills_block and share.start < entry.came_with) or is_prompt_complete or is_all:
            self.keep_full(entry, share.end)
        if is_prompt_complete:
            self.keep_tail(entry, share.end)

    def keep_full(self, entry: Entry, end: int) -> None:
        """Cache all full blocks among the first `end` tokens."""
        cache = self.cache
        if cache is not None:
            for prefix in cache.full_blocks(entry.salt, entry.known[:end])[len(entry.shared) :]:
                if entry.tail is not None and cache.parent(prefix) == cache.parent(entry.tail):
                    self.drop_tail(entry)
                if not cache.insert(prefix):
                    cache.withdraw(entry.name)
                    break
                entry.shared.append(prefix)
                if cache.on_their_way.get(prefix) == entry.name:
                    del cache.on_their_way[prefix]
                if entry.ttl and len(prefix[1]) <= len(entry.prompt):
                    cache.pin(prefix, entry.ttl)

    def keep_tail(self, entry: Entry, end: int) -> None:
        if self.cache is None or not end % self.block_size or len(entry.shared) != end // self.block_size:
            return
        self.drop_tail(entry)
        tail = (entry.salt, entry.known[:end])
        if self.cache.insert_tail(tail):
            entry.tail = tail

    def drop_tail(self, entry: Entry) -> None:
        if self.cache is not None and entry.tail is not None:
            self.cache.remove(entry.tail)
            entry.tail = None

    # ---- results and ends -----------------------------------------------------------------------------------------

    def took(self, step: Step, duration_s: float) -> None:
        self.pace.observe(num_chunk_tokens=sum(step.tokens.values()) - len(step.tokens), duration_s=duration_s)

    def land(self, step: Step, tokens: dict[str, int], failed: set[str], stop_token: int) -> list[str]:
        """Take in a result; returns who ended. What was computed is kept before anybody ends. Requests that failed, and
        those without their token, end. If all have failed, nothing may have run, so what the step was to move out is
        not to be trusted."""
        ended = []
        if self.cache is not None and all(share.entry.name in failed for share in step.shares):
            self.cache.distrust(step.host_slots)
        failed = failed | {entry.name for entry in step.sampling if entry.name not in tokens}
        for share in step.shares:
            if share.entry.name not in failed:
                self.keep(share)
        for share in step.shares:
            entry = share.entry
            if entry not in self.entries:
                continue
            if entry.name in failed:
                self.remove(entry.name, keep=False)
                ended.append(entry.name)
            elif share.samples and self.sampled(entry, tokens[entry.name], share.end, stop_token):
                ended.append(entry.name)
        return ended

    def sampled(self, entry: Entry, token: int, computed: int, stop_token: int) -> bool:
        """Take one output token of a live entry; returns whether the request ended."""
        entry.pending -= 1
        entry.output.append(token)
        if token == stop_token or len(entry.known) >= entry.limit:
            if entry.name in self.running:
                self.keep_full(entry, computed)
                self.keep_tail(entry, computed)
            self.remove(entry.name)
            return True
        return False

    def remove(self, name: str, *, keep: bool = True) -> None:
        (entry,) = [e for e in self.entries if e.name == name]
        self.leave(entry, keep=keep)
        self.entries.remove(entry)

    def leave(self, entry: Entry, *, keep: bool) -> None:
        """Out of the batch, if it is in it: what it has generated is cached, unless it has failed; what only it has
        used is idle from now on, the last block first."""
        if keep and entry.name in self.running:
            self.keep_full(entry, entry.landed)
        self.running.discard(entry.name)
        entry.computed = 0
        blocks = [*entry.shared] if entry.tail is None else [*entry.shared, entry.tail]
        entry.shared, entry.tail = [], None
        if self.cache is None:
            return
        self.cache.withdraw(entry.name)
        still_used = {prefix for other in self.in_order(running=True) for prefix in other.shared}
        for prefix in reversed(blocks):
            if prefix not in still_used:
                self.cache.let_go(prefix, keep=keep)
