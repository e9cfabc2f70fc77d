"""The real scheduler and the brute-force model, driven with the same calls; after each of them they must agree.

A runner's memory goes along: it computes every plan, so a block that is shared, copied or found again must hold exactly
the tokens that it is taken for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from headway.core import (
    HostTier,
    KVCacheManager,
    ModelRunnerOutput,
    PrefixCache,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledTokens,
    Scheduler,
    SchedulerOutput,
    check_invariants,
    prefix_cache,
)
from headway.core.blocks import block_digests, root_digest, tail_digest
from headway.core.request_options import RequestOptions
from headway.errors import RequestTooLargeError
from headway.settings import SchedulerSettings
from tests.property.brute_force import BruteForceScheduler
from tests.property.brute_force_cache import BruteForceCache, Prefix
from tests.property.brute_force_entry import Entry, Step
from tests.property.slot_memory import SlotMemory

STOP_TOKEN = 9


@dataclass(frozen=True)
class Setting:
    """One engine."""

    config: SchedulerSettings
    num_blocks: int
    block_size: int
    prefix_caching: bool = False
    num_host_slots: int = 0
    restore_block_s: float = 0.0
    reserve_tokens: int = 0


class SideBySide:
    """Calls go to both. `events` counts what really happened, for tests that want to see it happen."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        num_blocks, block_size = setting.num_blocks, setting.block_size
        cache = PrefixCache() if setting.prefix_caching else None
        tier = HostTier(setting.num_host_slots) if setting.num_host_slots else None
        kv_cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_cache=cache,
            host_tier=tier,
            restore_block_s=setting.restore_block_s,
            reserve_tokens=setting.reserve_tokens,
        )
        self.scheduler = Scheduler(setting.config, kv_cache)
        model_cache = None
        if setting.prefix_caching:
            model_cache = BruteForceCache(block_size, prefix_cache.MAX_TAILS, setting.num_host_slots)
        self.model = BruteForceScheduler(setting.config, num_blocks, block_size, model_cache, setting.reserve_tokens)
        self.model.restore_block_s = setting.restore_block_s
        self.memory = SlotMemory(num_blocks, block_size)
        self.in_flight: deque[tuple[SchedulerOutput, Step, dict[str, int]]] = deque()
        self.is_broken = False
        """Whether the last step could not be submitted: its result must be told before the next one is planned."""
        self.trace: list[tuple[tuple[str, int], ...]] = []
        self.events: Counter[str] = Counter()
        self._requests: dict[str, Request] = {}  # by name, the last one that had it
        self._untold_preempted: list[str] = []  # who left the batch since the last step that was not empty
        self._untold_finished: list[str] = []
        self._digests: dict[Prefix, bytes] = {}

    @property
    def live(self) -> list[str]:
        return list(self.scheduler.requests)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Collection[int],
        max_tokens: int,
        *,
        priority: int = 0,
        salt: str = "",
        ttl: float = 0.0,
        reads: bool = True,
        tenant: str = "",
        predicted: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
        now_s: float | None = None,
    ) -> bool:
        """Returns whether it was accepted; both must say the same."""
        request = Request(
            name,
            tuple(prompt),
            max_tokens=max_tokens,
            stop_token_ids=frozenset([STOP_TOKEN]),
            reads_cache=reads,
            options=RequestOptions(
                priority=priority,
                cache_salt=salt or None,
                cache_ttl_s=ttl,
                tenant=tenant,
                predicted_tokens=predicted,
                ttft_target_s=ttft,
                tpot_target_s=tpot,
            ),
        )
        fits = self.model.could_fit(len(prompt) + max_tokens)
        try:
            self.scheduler.add_request(request, now_s=now_s)
        except RequestTooLargeError:
            assert not fits
            self.events["refused"] += 1
            return False
        assert fits
        self.events["id used again in flight"] += any(name in step.tokens for _, step, _ in self.in_flight)
        entry = Entry(
            name,
            tuple(prompt),
            len(prompt) + max_tokens,
            salt=salt,
            ttl=ttl,
            reads=reads,
            priority=priority,
            tenant=tenant,
            predicted=predicted,
            ttft=ttft,
            tpot=tpot,
        )
        self.model.add(entry, now_s)
        self._requests[name] = request
        return True

    def abort(self, name: str) -> None:
        self.scheduler.finish_request(name, RequestStatus.FINISHED_ABORTED)
        if name in self.model.running or name in self.model.held:
            self._untold_finished.append(name)
        self.model.remove(name)
        self.compare()

    def launch(self, draw_token: Callable[[], int], now_s: float = 0.0, *, breaks: bool = False) -> bool:
        """Plan a step and run it, unless it `breaks`; its tokens are drawn now and told later. Returns whether there
        was one."""
        assert not self.is_broken
        output = self.scheduler.schedule(now_s=now_s)
        expected = self.model.schedule(now_s)
        assert [(share.request_id, share.num_tokens) for share in output.scheduled] == list(expected.tokens.items())
        assert [(new.request_id, new.num_computed_tokens) for new in output.new_requests] == expected.admitted
        assert [share.samples for share in output.scheduled] == [share.samples for share in expected.shares]
        assert [share.num_computed_tokens for share in output.scheduled] == [share.start for share in expected.shares]
        assert output.num_scheduled_tokens == sum(expected.tokens.values())
        self._count_plan(expected)
        self._untold_preempted += expected.preempted
        if output.is_empty:
            assert not output.preempted_request_ids and not output.finished_request_ids and not any(output.moves)
            self.compare()
            return False
        assert list(output.preempted_request_ids) == self._untold_preempted
        assert sorted(output.finished_request_ids) == sorted(self._untold_finished)
        self._untold_preempted, self._untold_finished = [], []
        tokens = {entry.name: draw_token() for entry in expected.sampling}
        self.is_broken = breaks
        if breaks:
            self.memory.drop(output)
        else:
            self.memory.run(output, tokens)
        self.in_flight.append((output, expected, tokens))
        self.trace.append(tuple((share.request_id, share.num_tokens) for share in output.scheduled))
        self.compare()
        return True

    def land(
        self, *, duration_s: float = 0.0, failed: Collection[str] = (), forgotten: Collection[str] = ()
    ) -> list[str]:
        """Tell the result of the oldest step. `failed` got an error, `forgotten` got nothing. Returns who ended."""
        output, step, drawn = self.in_flight.popleft()
        is_broken, self.is_broken = self.is_broken and not self.in_flight, self.is_broken and bool(self.in_flight)
        failing = {share.entry.name for share in step.shares if is_broken or share.entry.name in failed}
        self.events["broken"] += is_broken
        tokens = {name: token for name, token in drawn.items() if name not in failing and name not in forgotten}
        for name in [*failing, *(drawn.keys() - tokens.keys())]:
            self.memory.fail(output.step_id, name)
        sampled = {name: SampledTokens((token,)) for name, token in tokens.items()}
        sampled |= {name: SampledTokens((), error="boom") for name in failing}
        updates = self.scheduler.update(output, ModelRunnerOutput(sampled, {}), duration_s=duration_s)
        self._count(step, failing)
        entries = {entry.name: entry for entry in self.model.entries}
        in_batch = {*self.model.running, *self.model.held}
        alive = {share.entry.name for share in step.shares if share.entry in self.model.entries}
        awaited = (alive - {*self.model.held}) & (drawn.keys() | failing)
        self.model.took(step, duration_s)
        ended = self.model.land(step, tokens, failing, STOP_TOKEN)
        self._untold_finished += [name for name in ended if name in in_batch]
        self._check_ends(updates, ended, entries)
        answered = [update.request_id for update in updates if update.new_token_ids or update.error]
        assert sorted(answered) == sorted(awaited)
        self.compare()
        return ended

    def release(self) -> list[str]:
        """Nothing could be planned: perhaps because all of a sealed batch are done. Returns who ended."""
        entries = {entry.name: entry for entry in self.model.entries}
        updates = self.scheduler.release_held()
        ended = self.model.release_held()
        self._untold_finished += ended
        self._check_ends(updates, ended, entries)
        assert len(updates) == len(ended)
        self.compare()
        return ended

    def opens_at_s(self) -> float | None:
        """When a batch may be formed, if that is all that is being waited for."""
        opens_at_s = self.scheduler.opens_at_s()
        assert opens_at_s == self.model.opens_at()
        return opens_at_s

    def _check_ends(self, updates: list[RequestUpdate], ended: list[str], entries: Mapping[str, Entry]) -> None:
        """The same requests have ended, each with exactly its tokens."""
        assert [update.request_id for update in updates if update.finish_status is not None] == ended
        for name in ended:
            assert self._requests[name].output_token_ids == entries[name].output
            assert self._requests[name].status.is_finished

    def _count_plan(self, step: Step) -> None:
        model, config = self.model, self.setting.config
        self.events["preempted"] += len(step.preempted)
        self.events["displaced"] += step.num_displaced
        self.events["no time"] += step.had_no_time
        self.events["passed a long prompt"] += len(step.passed)
        self.events["held"] += len(model.held)
        self.events["paced"] += bool(step.shares) and step.limit < (config.max_num_batched_tokens or 0)
        self.events["limited"] += step.has_limit
        has_had_enough = any(e.preemptions >= config.max_preemptions for e in model.in_batch())
        self.events["spared"] += bool(step.preempted) and has_had_enough
        numbers = [entry.number for entry in model.line()]
        self.events["not in order of arrival"] += numbers != sorted(numbers)

    def _count(self, step: Step, failing: Collection[str]) -> None:
        alive = [entry for entry in step.sampling if entry in self.model.entries]
        self.events["dropped"] += len(step.sampling) - len(alive)
        waiting = self.model.waiting()
        self.events["late for a preempted one"] += sum(entry in waiting for entry in alive)
        self.events["failed"] += len(failing)

    # ---- agreement ------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        check_invariants(self.scheduler)
        cache, model = self.scheduler.kv_cache.prefix_cache, self.model.cache
        if cache is None or model is None:
            return
        blocks = {block.digest: block for block in cache}
        expected = {self._digest(prefix): prefix for prefix in model.kept}
        assert blocks.keys() == expected.keys(), "something else is cached"
        idle = {self._digest(prefix) for prefix in model.idle}
        assert {digest for digest, block in blocks.items() if block.is_idle} == idle
        for digest, prefix in expected.items():
            assert self.memory.holds(blocks[digest].block_id, prefix[1]), f"{blocks[digest]} does not hold {prefix}"
        assert cache.announced == {self._digest(prefix): name for prefix, name in model.on_their_way.items()}
        tier = self.scheduler.kv_cache.host_tier
        if tier is not None:
            assert len(tier) == len(model.host)
            assert all(self._digest(prefix) in tier for prefix in model.host)
            assert self.is_broken or all(self.memory.host_holds(slot, p[1]) for p, slot in model.host.items())
        counts = cache.stats
        assert (counts.num_inserted_blocks, counts.num_evicted_blocks) == (model.num_inserted, len(model.evicted))
        assert (counts.num_queried_tokens, counts.num_hit_tokens) == (model.num_queried, model.num_hits)

    def _digest(self, prefix: Prefix) -> bytes:
        if prefix not in self._digests:
            salt, tokens = prefix
            num_full, num_in_tail = divmod(len(tokens), self.setting.block_size)
            block_size = self.setting.block_size
            full = block_digests(root_digest(salt), tokens[: num_full * block_size], block_size)
            if num_in_tail:
                before = full[-1] if full else root_digest(salt)
                self._digests[prefix] = tail_digest(before, tokens[-num_in_tail:])
            else:
                self._digests[prefix] = full[-1]
        return self._digests[prefix]

    def counts(self) -> Mapping[str, int]:
        """`events`, and what the model's guard and cache saw."""
        cache, guard = self.model.cache, self.model.guard
        if guard is not None:
            self.events["lifted"] = guard.num_lifted
        if cache is None:
            return self.events
        return self.events + Counter(
            {
                "hit": cache.num_hits,
                "tail copied": cache.num_tail_hits,
                "waited": cache.num_waits,
                "duplicate": cache.num_duplicates,
                "evicted": len(cache.evicted),
                "evicted although pinned": cache.num_evicted_pinned,
                "restored": cache.num_restored,
            }
        )
