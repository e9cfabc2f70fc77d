"""The scheduler again, written to be obviously right instead of fast: plain lists, everything sorted every step, blocks
counted by arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from headway.core.step_time import DecodePace
from headway.settings import SchedulerSettings
from tests.property.brute_force_cache import BruteForceCache, Prefix
from tests.property.brute_force_entry import Entry, Share, Step
from tests.property.brute_force_guard import BruteForceGuard
from tests.property.brute_force_policies import BRUTE_FORCE_POLICIES


class BruteForceScheduler:
    """All live requests in one list; `running` is a set of names."""

    def __init__(
        self,
        config: SchedulerSettings,
        num_blocks: int,
        block_size: int,
        cache: BruteForceCache | None = None,
        reserve_tokens: int = 0,
    ) -> None:
        self.config, self.num_blocks, self.block_size, self.cache = config, num_blocks, block_size, cache
        self.reserve_tokens = reserve_tokens
        self.target_s = (config.target_itl_ms or 0) / 1e3
        self.pace = DecodePace(
            target_s=self.target_s,
            long_step_s=(500.0 if config.long_prompt_step_ms is None else config.long_prompt_step_ms) / 1e3,
            max_tokens=config.max_num_batched_tokens,
        )
        self.passed_one: Entry | None = None
        self.passed_from = self.num_passed = 0
        self.joined = -math.inf
        self.restore_block_s = 0.0
        self.now, self.step_s = 0.0, 0.02
        self.entries: list[Entry] = []
        self.running: set[str] = set()
        self.held: list[Entry] = []
        """Of a sealed batch, those that have their last token."""
        self.is_forming = False
        """Whether others may still join the batch that there is."""
        self.length_class: int | None = None
        """Of the batch that is being formed, where batches are of about one length."""
        self.num_arrivals = 0
        self.events: Counter[str] = Counter()
        self.policy = BRUTE_FORCE_POLICIES[config.scheduling_policy](self)
        self.guard: BruteForceGuard | None = None
        if self.policy.can_starve and config.starvation_ms:
            self.guard = BruteForceGuard(config.starvation_ms / 1e3, config.starvation_stretch, self.policy.promise)

    def blocks(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def could_fit(self, num_tokens: int) -> bool:
        """Alone, if it may become so long."""
        return self.blocks(max(num_tokens - 1, self.reserve_tokens)) <= self.num_blocks

    def add(self, entry: Entry, now: float | None) -> None:
        entry.number, entry.arrived = self.num_arrivals, self.now if now is None else now
        if self.running:
            self.joined = entry.arrived
        self.num_arrivals += 1
        self.policy.arrives(entry)
        self.entries.append(entry)
        if self.guard is not None:
            self.guard.arrives(entry)

    # ---- who is where ---------------------------------------------------------------------------------------------

    def in_batch(self) -> list[Entry]:
        """Those that run, in the order that they had when they entered."""
        running = [e for e in self.entries if e.name in self.running]
        return sorted(running, key=lambda e: (e.entered_as, e.order, e.number))

    def with_blocks(self) -> list[Entry]:
        return [*self.in_batch(), *self.held]

    def waiting(self) -> list[Entry]:
        return [e for e in self.entries if e.name not in self.running and e not in self.held]

    def line(self) -> list[Entry]:
        """Those that may enter, the first one first."""
        if self.config.batching == "dynamic":
            return sorted(self.waiting(), key=lambda e: (not e.is_fork, e.length_class != self.length_class, e.number))
        line = self.policy.line(self.waiting())
        return line if self.guard is None else self.guard.line(line)

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def used(self, step: Step, leaving: Sequence[Entry] = (), found: Sequence[Prefix] = ()) -> int:
        """Blocks in use, counting what this step has already been given; one that is shared counts once. Without those
        of the `leaving`, and with the `found` ones."""
        users = [e for e in self.with_blocks() if e not in leaving]
        shared = {*found, *(prefix for entry in users for prefix in entry.shared)}
        return len(shared) + sum(self.blocks(e.computed + step.tokens.get(e.name, 0)) - len(e.shared) for e in users)

    def promised(self, step: Step, leaving: Sequence[Entry]) -> int:
        """Blocks that are kept for requests in the batch: for the tokens they were admitted with, or for more."""
        stay = [e for e in self.with_blocks() if e not in leaving]
        return sum(max(0, e.reserved - self.blocks(e.computed + step.tokens.get(e.name, 0))) for e in stay)

    def own_tokens(self, entry: Entry) -> int:
        """What would have to be computed again if it had to go: not what is in blocks that others use, too."""
        others = [other for other in self.with_blocks() if other is not entry]
        num_shared = sum(any(prefix in other.shared for other in others) for prefix in entry.shared)
        return entry.computed - num_shared * self.block_size

    def make_free(self, step: Step, num_blocks: int) -> None:
        """Evict until so many blocks are neither used nor cached."""
        while self.cache is not None and self.num_blocks - self.used(step) - len(self.cache.idle) < num_blocks:
            self.cache.evict()

    # ---- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> Step:
        self.now = now
        if self.guard is not None:
            self.guard.advance(now, self.waiting())
        if self.cache is not None:
            self.cache.now, self.cache.read_now, self.cache.written_now = now, [], set()
        step = Step(limit=self.config.max_num_batched_tokens)
        if self.config.prefill_mode == "chunked":
            self.decode(step)
            self.leave_time(step)
            self.let_short_pass(step)
            self.compute_prompts(step)
        else:
            one, other = self.decode, self.compute_prompts
            if self.config.prefill_mode == "prefill-first":
                one, other = other, one
            one(step)
            if not step.tokens:
                other(step)
        self.launch(step)
        return step

    def decode(self, step: Step) -> None:
        for entry in [e for e in self.in_batch() if e.remaining == 1]:
            self.compute(step, entry)

    def leave_time(self, step: Step) -> None:
        """Prompts get what keeps the pace of those that generate."""
        backlog = sum(e.remaining for e in self.in_batch() if e.remaining > 1) + sum(e.tokens for e in self.waiting())
        target = self.policy.pace(self.target_s)
        limit = self.policy.limit()
        step.has_limit = limit < math.inf
        allowance = self.pace.chunk_tokens(
            target_s=target, num_decodes=len(step.tokens), num_backlog_tokens=backlog, limit_s=limit
        )
        step.limit = min(step.limit, len(step.tokens) + allowance)
        step.for_prompts = self.left(step)
        step.longest_short = self.pace.max_short_tokens(step.for_prompts)
        step.with_long = min(step.for_prompts, self.pace.long_tokens(len(step.tokens)))

    def is_long(self, step: Step, entry: Entry, num_tokens: int) -> bool:
        """With so many tokens to compute. In a sealed batch no request passes another."""
        return (
            self.config.batching == "continuous" and entry.tokens > step.longest_short and num_tokens > step.with_long
        )

    def to_compute(self, entry: Entry) -> int:
        """Of one that waits."""
        return entry.tokens - len(self.find(entry)) * self.block_size

    def shorten(self, step: Step) -> None:
        """A long prompt is to be computed, alone or while requests come."""
        if len(self.entries) > 1 and self.now - self.joined >= 100 * self.pace.long_step_s:
            return
        taken = step.for_prompts - self.left(step)
        step.limit -= max(0, self.left(step) - max(0, step.with_long - taken))

    def let_short_pass(self, step: Step) -> None:
        """Short prompts before the first long one that runs: all that pass it have at most its share of its tokens, and
        it keeps half of each step."""
        prompts = [e for e in self.in_batch() if e.remaining > 1]
        longs = [e for e in prompts if self.is_long(step, e, e.remaining)]
        if not longs:
            return
        self.shorten(step)
        long = longs[0]
        place = prompts.index(long)
        left = self.left(step) - sum(e.remaining for e in prompts[:place])
        if left <= 0 or step.preempted or self.config.scheduling_policy == "fair":
            return
        if long is not self.passed_one or long.computed < self.passed_from:
            self.passed_one, self.passed_from, self.num_passed = long, long.computed, 0
        own, share = long.computed - self.passed_from, self.config.short_prompt_share
        most = left // 2
        while most > 0 and self.num_passed + most > share * (own + left - most) + 1e-9:
            most -= 1
        limit, before = step.limit, sum(step.tokens.values())
        step.limit = before + most
        for entry in prompts[place + 1 :]:
            if not self.is_long(step, entry, entry.remaining):
                self.compute(step, entry)
        while self.left(step) and not step.preempted:
            entry = self.next_to_pass(step, long)
            if entry is None or self.should_wait(entry) or not self.fits(step, entry):
                break
            self.admit(step, entry)
            step.passed.append(entry.name)
        self.num_passed += sum(step.tokens.values()) - before
        step.limit = limit

    def next_to_pass(self, step: Step, long: Entry) -> Entry | None:
        """The first short one that the policy does not put behind the long one: among the first places, or anywhere in
        the line, if its order does not change, by its tokens to three binary digits and up."""
        seats = self.config.max_num_seqs - len(self.running)
        line = self.line()
        near = line[: self.config.skip_window + 1]
        if seats == 0 or not near:
            return None
        lifted = [] if self.guard is None else self.guard.lifted
        near = [entry for entry in near if entry in lifted] or near
        if seats == 1:
            near = near[:1]
        for entry in near:
            if self.to_compute(entry) <= step.longest_short and self.policy.rank(entry) <= long.entered_as:
                return entry
        if seats == 1 or lifted or len(line) < self.config.skip_window + 1 or not self.policy.keeps_order:
            return None
        for entry in line:
            if rounded_up(entry.tokens) <= step.longest_short:
                return entry if self.policy.rank(entry) <= long.entered_as else None
        return None

    def compute_prompts(self, step: Step) -> None:
        for entry in [e for e in self.in_batch() if e.remaining > 1]:
            self.compute(step, entry)
        entrants = self.entrants()
        if step.preempted or entrants == "none":
            return
        while self.left(step) and self.let_in(step, entrants):
            pass
        is_full = not self.left(step) or step.had_no_time
        self.is_forming = entrants == "all" and is_full and self.has_seat() and bool(self.waiting())

    def launch(self, step: Step) -> None:
        by_name = {entry.name: entry for entry in self.entries}
        for name, num_tokens in step.tokens.items():
            entry = by_name[name]
            start, entry.computed = entry.computed, entry.computed + num_tokens
            self.policy.served(entry, start, entry.computed)
            samples = entry.computed == entry.tokens
            entry.pending += samples
            step.shares.append(Share(entry, entry.stay, start, entry.computed, samples))
        step.host_slots = set() if self.cache is None else self.cache.written_now

    def left(self, step: Step) -> int:
        return step.limit - sum(step.tokens.values())

    def compute(self, step: Step, entry: Entry) -> None:
        if self.left(step) == 0 or entry.name not in self.running or entry.name in step.tokens:
            return
        wanted = min(entry.remaining, self.left(step), self.config.max_chunk_tokens or 10**9)
        if entry.remaining > 1:
            wanted = self.policy.chunk(step, entry, wanted)
        while entry.name in self.running:
            own = self.blocks(entry.computed)
            room = (self.num_blocks - self.used(step) + own) * self.block_size - entry.computed
            if room > 0:
                given = min(wanted, room)
                self.make_free(step, self.blocks(entry.computed + given) - own)
                step.tokens[entry.name] = given
                return
            self.preempt(step, self.policy.victim(self.may_be_preempted() or self.in_batch()))

    def may_be_preempted(self) -> list[Entry]:
        return [e for e in self.in_batch() if e.preemptions < self.config.max_preemptions]

    def preempt(self, step: Step, victim: Entry) -> None:
        step.tokens.pop(victim.name, None)
        self.leave(victim, keep=True)
        victim.preemptions += 1
        step.preempted.append(victim.name)
        if self.guard is not None:
            self.guard.comes_back(victim, self.now)

    # ---- coming in ------------------------------------------------------------------------------------------------

    def has_seat(self) -> bool:
        return len(self.with_blocks()) < self.config.max_num_seqs

    def entrants(self) -> str:
        """Who may enter: with sealed batches "all" while one is being formed, then only "forks" of beams in it."""
        if self.config.batching == "continuous":
            return "all"
        is_empty = not self.with_blocks()
        if is_empty:
            self.length_class = None
        line = self.line()
        if not self.is_forming and line and line[0].is_fork:
            return "forks"
        if not self.is_forming and not is_empty:
            return "none"
        if is_empty and line and self.config.batching == "dynamic":
            num_alike = sum(entry.length_class == line[0].length_class for entry in line)
            has_waited = line[0].arrived + self.config.batch_window_ms / 1e3 <= self.now
            if num_alike < self.config.max_num_seqs and not has_waited and not line[0].is_fork:
                return "none"
            self.length_class = line[0].length_class
            self.events["started late" if has_waited else "started full"] += not line[0].is_fork
        return "all"

    def may_enter(self, entry: Entry, entrants: str) -> bool:
        is_alike = self.config.batching != "dynamic" or entry.length_class == self.length_class
        return entry.is_fork or (entrants == "all" and is_alike)

    def let_in(self, step: Step, entrants: str) -> bool:
        """One enters, if there is a seat and one of the first in the line fits; or some are displaced for the first.
        Returns whether there may be more to do."""
        passed: list[Entry] = []
        for entry in self.line()[: self.config.skip_window + 1]:
            if not self.may_enter(entry, entrants):
                return False
            if self.has_seat() and self.should_wait(entry):
                passed.append(entry)
                continue
            if self.has_seat() and self.fits(step, entry):
                if self.config.prefill_mode == "chunked" and self.is_long(step, entry, self.to_compute(entry)):
                    self.shorten(step)
                step.had_no_time = not self.has_time(step, entry)
                if step.had_no_time:
                    return False
                for other in passed:
                    other.skips += 1
                self.admit(step, entry)
                return True
            victims = [] if passed else self.displaced(step, entry)
            for victim in victims:
                self.preempt(step, victim)
            step.num_displaced += len(victims)
            if victims:
                return True
            if not self.has_seat() or entry.skips >= self.config.max_head_skips:
                return False
            passed.append(entry)
        return False

    def could_enter(self, step: Step, entry: Entry) -> bool:
        """If it were the first in the line, and the step had tokens left."""
        return (
            self.may_enter(entry, self.entrants())
            and self.has_seat()
            and not self.should_wait(entry)
            and self.fits(step, entry)
        )

    def displaced(self, step: Step, entry: Entry) -> list[Entry]:
        """Those that leave so that it can enter, four in a step at most: as many as are needed, or none."""
        if entry.pending or self.held or self.should_wait(entry):
            return []
        candidates = [e for e in self.may_be_preempted() if e.name not in {*step.newcomers, *step.preempted}]
        victims: list[Entry] = []
        while candidates and step.num_displaced + len(victims) < 4:
            victim = self.policy.displaced(entry, candidates)
            if victim is None:
                break
            candidates.remove(victim)
            victims.append(victim)
            if self.fits(step, entry, victims):
                return victims
        return []

    def fits(self, step: Step, entry: Entry, leaving: Sequence[Entry] = ()) -> bool:
        """Beside all that is promised, with a spare block for each that runs, where these may need one."""
        found = self.find(entry)
        spare = 0 if self.reserve_tokens else len(self.running) - len(leaving)
        needed = self.blocks(max(entry.tokens, self.reserve_tokens)) - len(found)
        taken = self.used(step, leaving, found) + self.promised(step, leaving)
        return needed + taken + spare <= self.num_blocks and entry.pending == 0

    def has_time(self, step: Step, entry: Entry) -> bool:
        """A prompt that is not to be cut must fit into what is left of the step, or be the first in it."""
        if self.config.prefill_mode == "chunked" or not step.tokens:
            return self.left(step) > 0
        return entry.tokens - len(self.find(entry)) * self.block_size <= self.left(step)

    def admit(self, step: Step, entry: Entry) -> None:
        for other in self.waiting():
            other.passes += (other.order, other.number) < (entry.order, entry.number)
        entry.skips = entry.passes = 0
        entry.entered_as = self.policy.rank(entry)
        if self.guard is not None:
            self.guard.enters(entry, self.now, [e for e in self.waiting() if e is not entry])
        entry.stay += 1
        entry.came_with, entry.landed = entry.tokens, 0
        entry.reserved = self.blocks(max(entry.tokens, self.reserve_tokens))
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
        fills_block = share.end // self.block_size > share.start // self.block_size
        is_prompt_complete = share.end == len(entry.prompt)
        is_all = share.start < entry.came_with == share.end
        is_kept = (fills_block and share.start < entry.came_with) or is_prompt_complete or is_all
        if is_kept:
            self.keep_full(entry, share.end)
        if is_kept or share.end > entry.came_with:
            entry.landed = share.end
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
        self.step_s += (duration_s - self.step_s) / 20
        num_rows = len(step.tokens)
        self.pace.observe(
            num_chunk_tokens=sum(step.tokens.values()) - num_rows, num_decodes=num_rows, duration_s=duration_s
        )

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
            if entry not in self.entries or entry in self.held:
                continue
            if entry.name in failed:
                self.remove(entry.name, keep=False)
                ended.append(entry.name)
            elif share.samples and self.sampled(entry, tokens[entry.name], share.end, stop_token):
                ended.append(entry.name)
        if not any(share.entry.is_beam for share in step.shares):
            ended += self.release()
        return ended

    def release(self) -> list[str]:
        """If all of a sealed batch are done, they end; returns who."""
        ended = [] if self.running else [entry.name for entry in self.held]
        for name in ended:
            self.remove(name)
        self.events["batch done"] += bool(ended)
        return ended

    def sampled(self, entry: Entry, token: int, computed: int, stop_token: int) -> bool:
        """Take one output token of a live entry; returns whether the request ended."""
        entry.pending -= 1
        entry.output.append(token)
        if token == stop_token or len(entry.known) >= entry.limit:
            if entry.name in self.running:
                self.keep_full(entry, computed)
                self.keep_tail(entry, computed)
                if self.config.batching != "continuous" and not entry.is_beam:
                    self.running.remove(entry.name)
                    self.held.append(entry)
                    return False
            self.remove(entry.name)
            return True
        return False

    def remove(self, name: str, *, keep: bool = True) -> None:
        (entry,) = [e for e in self.entries if e.name == name]
        if self.guard is not None and entry in self.waiting():
            self.guard.ends(entry)
        self.leave(entry, keep=keep)
        self.entries.remove(entry)

    def leave(self, entry: Entry, *, keep: bool) -> None:
        """Out of the batch, if it is in it: what it has generated is cached, unless it has failed; what only it has
        used is idle from now on, the last block first."""
        if keep and entry in self.with_blocks():
            self.keep_full(entry, entry.landed)
        self.running.discard(entry.name)
        self.held = [other for other in self.held if other is not entry]
        entry.computed = 0
        blocks = [*entry.shared] if entry.tail is None else [*entry.shared, entry.tail]
        entry.shared, entry.tail = [], None
        if self.cache is None:
            return
        self.cache.withdraw(entry.name)
        still_used = {prefix for other in self.with_blocks() for prefix in other.shared}
        for prefix in reversed(blocks):
            if prefix not in still_used:
                self.cache.let_go(prefix, keep=keep)


def rounded_up(num_tokens: int) -> int:
    """To a number whose binary digits after the first four are zero."""
    unit = 2 ** max(0, math.floor(math.log2(num_tokens)) - 3)
    return math.ceil(num_tokens / unit) * unit
