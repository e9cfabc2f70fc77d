"""The real scheduler and the brute-force model, driven with the same calls; after each of them they must agree."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from headway.core import Request, RequestUpdate, SchedulerOutput
from headway.core.kv import prefix_cache
from headway.core.kv.blocks import block_digests, root_digest, tail_digest
from tests.property.brute_force import BruteForceScheduler
from tests.property.brute_force_cache import BruteForceCache, Prefix
from tests.property.brute_force_entry import Entry, Step
from tests.property.driven_scheduler import STOP_TOKEN, DrivenScheduler, Result, Setting


class SideBySide(DrivenScheduler):
    """Calls go to both."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        cache = None
        if setting.prefix_caching:
            cache = BruteForceCache(setting.block_size, prefix_cache.MAX_TAILS, setting.num_host_slots)
        self.model = BruteForceScheduler(
            setting.config, setting.num_blocks, setting.block_size, cache, setting.reserve_tokens
        )
        self.model.restore_block_s = setting.restore_block_s
        self._steps: deque[Step] = deque()  # of the model, as in `in_flight`
        self._now_s = 0.0
        self._digests: dict[Prefix, bytes] = {}

    def add(self, request: Request, *, now_s: float | None = None) -> bool:
        is_accepted = super().add(request, now_s=now_s)
        assert is_accepted == self.model.could_fit(request.max_total_tokens)
        if is_accepted:
            self.model.add(_entry(request), now_s)
        return is_accepted

    def on_aborted(self, name: str) -> None:
        self.model.remove(name)

    def on_planning(self, now_s: float) -> None:
        self._now_s = now_s

    def on_planned(self, output: SchedulerOutput) -> None:
        step = self.model.schedule(self._now_s)
        assert [(share.request_id, share.num_tokens) for share in output.scheduled] == list(step.tokens.items())
        assert [(new.request_id, new.num_computed_tokens) for new in output.new_requests] == step.admitted
        assert [share.samples for share in output.scheduled] == [share.samples for share in step.shares]
        assert [share.num_computed_tokens for share in output.scheduled] == [share.start for share in step.shares]
        assert output.num_scheduled_tokens == sum(step.tokens.values())
        assert {*self.model.running} == {one.request_id for one in self.scheduler.live.running}
        self._count_plan(step)
        if not output.is_empty:
            self._steps.append(step)

    def on_landed(self, result: Result, updates: list[RequestUpdate]) -> None:
        step = self._steps.popleft()
        entries = {entry.name: entry for entry in self.model.entries}
        alive = {
            share.entry.name
            for share in step.shares
            if share.entry in self.model.entries and share.entry not in self.model.held
        }
        moves = result.flight.output.moves
        copies_s = (len(moves.moved_in) + len(moves.moved_out)) * self.setting.restore_block_s
        if copies_s <= 0.1 * result.duration_s:
            self.model.took(step, result.duration_s)
        ended = self.model.land(step, dict(result.tokens), set(result.failing), STOP_TOKEN)
        assert [update.request_id for update in updates if update.finish_status is not None] == ended
        for name in ended:
            assert self.requests[name].output_token_ids == entries[name].output
            assert self.requests[name].status.is_finished
        answered = [update.request_id for update in updates if update.new_token_ids or update.error]
        assert sorted(answered) == sorted(alive & (result.flight.tokens.keys() | set(result.failing)))

    def on_released(self, updates: list[RequestUpdate]) -> None:
        assert [update.request_id for update in updates] == self.model.release()

    def _count_plan(self, step: Step) -> None:
        model, config = self.model, self.setting.config
        self.events["displaced"] += step.num_displaced
        self.events["held"] += len(model.held)
        self.events["still forming"] += model.is_forming
        self.events["no time"] += step.had_no_time
        self.events["passed a long prompt"] += len(step.passed)
        self.events["paced"] += bool(step.shares) and step.limit < config.max_num_batched_tokens
        self.events["limited"] += step.has_limit
        has_had_enough = any(e.preemptions >= config.max_preemptions for e in model.in_batch())
        self.events["spared"] += bool(step.preempted) and has_had_enough
        numbers = [entry.number for entry in model.line()]
        self.events["not in order of arrival"] += numbers != sorted(numbers)

    # ---- agreement ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
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
        tiers = self.scheduler.kv_cache.tiers
        if tiers is not None:
            assert len(tiers.host) == len(model.host)
            assert all(self._digest(prefix) in tiers.host for prefix in model.host)
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
        """`events`, and what the model, its guard and its cache saw."""
        cache, guard = self.model.cache, self.model.guard
        counts = self.events + self.model.events
        counts["lifted"] = 0 if guard is None else guard.num_lifted
        if cache is not None:
            counts.update(
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
        return counts


def _entry(request: Request) -> Entry:
    """A request as the model knows it."""
    options = request.options
    return Entry(
        request.request_id,
        request.prompt_token_ids,
        request.max_total_tokens,
        salt=options.cache_salt or "",
        ttl=options.cache_ttl_s,
        reads=request.reads_cache,
        priority=options.priority,
        tenant=options.tenant,
        predicted=options.predicted_tokens,
        ttft=options.ttft_target_s,
        tpot=options.tpot_target_s,
        is_beam=request.is_beam,
        is_fork=request.is_fork,
        order=request.order_index,
    )
