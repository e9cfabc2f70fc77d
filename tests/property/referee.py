"""What must be true of every schedule, said without a model: of budgets, seats and tokens, of batches that are sealed,
and of requests that are displaced for others.

Each rule is a sentence that a user of the scheduler would say, checked with public names only, from what was there
before a call and what is there after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.core import Request, RequestStatus, RequestUpdate, SchedulerOutput
from tests.property.driven_scheduler import STOP_TOKEN, DrivenScheduler, Result, Setting

MOST_DISPLACED = 4
"""In a step, for others."""
FIXED_ORDER = frozenset({"fcfs", "priority", "sjf", "srpt", "ltr", "mlfq"})
"""Policies under which the order of two waiting requests does not change."""
LIMITED = frozenset({"slo", "fair"})
"""Policies that may leave tokens of a step unused, for its time."""


@dataclass(frozen=True)
class Seen:
    """A live request before a plan."""

    request: Request
    key: Any
    """Of the policy, smaller is more urgent."""
    num_tokens: int
    num_remaining: int
    num_preemptions: int
    num_pending: int
    num_blocks: int
    """In its table, or promised to it."""

    @property
    def order(self) -> tuple[Any, int, int]:
        return (self.key, self.request.order_index, self.request.arrival_index)

    @property
    def rest(self) -> float:
        """Tokens that it is expected to generate yet."""
        most = self.request.max_total_tokens - self.request.num_prompt_tokens
        predicted = self.request.options.predicted_tokens or most
        return max(1.0, predicted - (self.num_tokens - self.request.num_prompt_tokens))


@dataclass(frozen=True)
class Before:
    """What there was before a plan."""

    now_s: float
    running: dict[Request, Seen]
    waiting: dict[Request, Seen]
    num_in_batch: int
    num_available: int
    num_promised: int
    is_forming: bool
    """Whether others may still join the batch that there is."""
    is_open: bool
    """Whether they must, if they fit."""


class Referee(DrivenScheduler):
    """Checks the rules with every call."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.config = setting.config
        self._seals = setting.config.batching != "continuous"
        self._is_chunked = setting.config.prefill_mode == "chunked"
        self._told: dict[Request, list[int]] = {}  # tokens of live requests, as the runner has told them
        self._done: set[Request] = set()  # of a sealed batch, those that have their last token
        self._is_forming = self._is_open = False
        self._members: list[Request] = []  # of the sealed batch
        self._num_passed: dict[Request, int] = {}  # requests from behind that entered past a waiting one
        self._displaced_for: dict[Request, list[Request]] = {}
        self._before: Before | None = None

    def add(self, request: Request, *, now_s: float | None = None) -> bool:
        is_accepted = super().add(request, now_s=now_s)
        if is_accepted:
            self._told[request] = []
        return is_accepted

    # ---- a plan ---------------------------------------------------------------------------------------------------

    def on_planning(self, now_s: float) -> None:
        scheduler, kv_cache = self.scheduler, self.scheduler.kv_cache
        if not scheduler.num_in_batch:
            self._is_open, self._members = False, []
        scheduler.view.advance(now_s)  # urgency is that of the plan's time
        self._before = Before(
            now_s=now_s,
            running={one: self._see(one) for one in scheduler.running},
            waiting={one: self._see(one) for one in scheduler.waiting},
            num_in_batch=scheduler.num_in_batch,
            num_available=kv_cache.num_available_blocks,
            num_promised=kv_cache.num_promised_blocks,
            is_forming=self._is_forming,
            is_open=self._is_open,
        )

    def _see(self, request: Request) -> Seen:
        kv_cache, name = self.scheduler.kv_cache, request.request_id
        return Seen(
            request,
            self.scheduler.policy.key(request),
            request.num_tokens,
            request.num_remaining_tokens,
            request.num_preemptions,
            request.num_pending_tokens,
            len(kv_cache.block_table(name)) + kv_cache.num_promised_to(name),
        )

    def on_planned(self, output: SchedulerOutput) -> None:
        before = self._before
        assert before is not None
        entered = [self.scheduler.requests[new.request_id] for new in output.new_requests]
        preempted = [one for one, seen in before.running.items() if one.num_preemptions > seen.num_preemptions]
        places = {name: place for place, name in enumerate(output.preempted_request_ids)}
        preempted.sort(key=lambda one: places.get(one.request_id, 0))
        for one in before.waiting:
            assert one.num_preemptions == before.waiting[one].num_preemptions, f"{one} enters and is preempted at once"
        self._check_limits(before, output)
        self._check_prefill_mode(before, output, preempted)
        self._check_gives_way(before, preempted, entered)
        self._check_order(before, entered)
        self._check_nothing_is_left_out(before, output, preempted, entered)
        if self._seals:
            self._check_sealed(before, output, preempted, entered)
        for one in entered:
            self._num_passed.pop(one, None)
            self._displaced_for.pop(one, None)

    def _computed(self, output: SchedulerOutput) -> set[Request]:
        return {self.scheduler.requests[share.request_id] for share in output.scheduled}

    def _check_limits(self, before: Before, output: SchedulerOutput) -> None:
        """Seats, tokens of a step, tokens of a request in it."""
        config, shares = self.config, output.scheduled
        assert self.scheduler.num_in_batch <= config.max_num_seqs, "more requests than seats"
        assert output.num_scheduled_tokens == sum(share.num_tokens for share in shares)
        assert output.num_scheduled_tokens <= config.max_num_batched_tokens, "a step with more tokens than it may have"
        assert all(1 <= share.num_tokens <= config.max_chunk_tokens for share in shares), "a share that is too large"
        assert len({share.request_id for share in shares}) == len(shares), "a request with two shares"
        running = {one.request_id for one in self.scheduler.running}
        assert all(share.request_id in running for share in shares), "a share for a request that does not run"
        assert {new.request_id for new in output.new_requests} <= {share.request_id for share in shares}, (
            "a request enters and computes nothing"
        )
        for new in output.new_requests:
            request = self.scheduler.requests[new.request_id]
            assert request in before.waiting or request in before.running, "a request enters that did not wait"
            assert [*new.output_token_ids] == self._told[request], "a request comes back without its tokens"

    def _check_prefill_mode(self, before: Before, output: SchedulerOutput, preempted: list[Request]) -> None:
        """No request that generates stalls for a prompt; or prompts have steps of their own."""
        computed = self._computed(output)
        decodes = {one for one, seen in before.running.items() if seen.num_remaining == 1}
        if preempted:
            return
        if self._is_chunked:
            assert decodes <= computed, "a request that generates has no share"
            return
        assert computed <= decodes or not computed & decodes, "prompts and decodes in one step"
        prompts = {one for one, seen in before.running.items() if seen.num_remaining > 1}
        if self.config.prefill_mode == "prefill-first":
            assert not (prompts and computed & decodes), "a request generates before all prompts are computed"
        else:
            assert decodes <= computed, "a prompt is computed while a request could generate"

    # ---- who gives way --------------------------------------------------------------------------------------------

    def _check_gives_way(self, before: Before, preempted: list[Request], entered: list[Request]) -> None:
        """A request is preempted because blocks have run out, or because it is displaced for one that enters."""
        most = self.config.max_preemptions
        for one in preempted:
            if before.running[one].num_preemptions >= most:
                spared = [u for u in before.running if u.status is RequestStatus.RUNNING and u not in entered]
                assert all(before.running[u].num_preemptions >= most for u in spared), f"{one} gives way too often"
        if not preempted:
            return
        if self._may_run_out(before):
            self.events["may have run out of blocks"] += 1
            if not entered:
                return
        self._check_displaced(before, preempted, entered)

    def _may_run_out(self, before: Before) -> bool:
        """Whether requests that ran could have needed more blocks than there were."""
        return self._most_growth(before.running.values()) > before.num_available

    def _most_growth(self, running: Iterable[Seen]) -> int:
        """The most blocks that these could take in a step."""
        kv_cache, most = self.scheduler.kv_cache, self.config.max_num_batched_tokens
        return sum(kv_cache.blocks_for(min(seen.num_remaining, most)) for seen in running)

    def _check_displaced(self, before: Before, preempted: list[Request], entered: list[Request]) -> None:
        """Few are displaced, each for a more urgent one that enters, and none without need."""
        new = [one for one in entered if one in before.waiting]
        first = self.scheduler.waiting.peek(0)
        if not self._is_chunked and first in before.waiting:
            new.append(first)  # its prompt may have to wait for the next step
        assert self.scheduler.policy.displaces, "waiting requests do not displace running ones"
        assert len(preempted) <= MOST_DISPLACED, "too many are displaced"
        assert new, "a request is displaced for nothing"
        if self._seals:
            assert not self._done, "a request is displaced from a batch of which others are done"
            is_own = all(one.is_fork for one in new)
            assert before.is_forming or is_own, "a request is displaced from a sealed batch"
        for victim in preempted:
            seen = before.running[victim]
            assert seen.num_preemptions < self.config.max_preemptions, f"{victim} has been preempted too often"
            assert any(self._may_displace(before, one, seen) for one in new), f"{victim} is more urgent"
            self._displaced_for[victim] = [one for one in new if one.status is RequestStatus.WAITING]
            self.events["displaced"] += 1
        for victim in set(entered) & set(preempted):
            assert any(entered.index(one) < entered.index(victim) for one in new), f"{victim} is back before the others"
        self._check_needed(before, preempted, new)

    def _may_displace(self, before: Before, one: Request, victim: Seen) -> bool:
        """By the order of the policy, and by as much as it says."""
        seen, options = before.waiting[one], victim.request.options
        if not seen.key < victim.key:
            return False
        if self.config.scheduling_policy == "srpt":
            return victim.rest > 6 * seen.rest
        if self.config.scheduling_policy == "slo":
            target_s = one.options.ttft_target_s
            has_targets = options.ttft_target_s is not None or options.tpot_target_s is not None
            is_urgent = target_s is not None and one.arrival_s + target_s / 2 <= before.now_s
            return is_urgent and seen.key[0] == 0 and not has_targets
        return True

    def _check_needed(self, before: Before, preempted: list[Request], new: list[Request]) -> None:
        """Without the last of them, those that entered would have found no seat, or no room."""
        if self.scheduler.kv_cache.prefix_cache is not None:
            return  # blocks that are shared are not counted here
        kv_cache = self.scheduler.kv_cache
        gone = [one for one in preempted[:-1] if one.status is RequestStatus.PREEMPTED]
        stay = [seen for one, seen in before.running.items() if one not in gone]
        num_seats = self.config.max_num_seqs - before.num_in_batch + len(gone)
        num_free = before.num_available - before.num_promised + sum(before.running[one].num_blocks for one in gone)
        num_spare = 0 if kv_cache.reserve_tokens else len(stay) + len(new)
        num_tokens = [max(before.waiting[one].num_tokens, kv_cache.reserve_tokens) for one in new]
        num_needed = sum(map(kv_cache.blocks_for, num_tokens)) + num_spare + self._most_growth(stay)
        if num_needed <= num_free and len(new) <= num_seats:
            raise AssertionError(f"{preempted} are displaced, and fewer would have been enough")

    # ---- order ----------------------------------------------------------------------------------------------------

    def _check_order(self, before: Before, entered: list[Request]) -> None:
        """Requests wait in the policy's order, those that were preempted too, and one that does not fit is passed only
        so often."""
        for one in entered:
            for other in self._displaced_for.get(one, ()):
                assert other.status is not RequestStatus.WAITING, f"{one} left for {other}, and enters before it"
        if self.config.scheduling_policy not in FIXED_ORDER or self.config.batching == "dynamic":
            return
        queue, front = self.scheduler.waiting, []
        for index in range(queue.num_overdue, self.config.skip_window + 1):
            one = queue.peek(index)
            if one is None:
                break
            front.append((self.scheduler.policy.key(one), one.order_index, one.arrival_index))
        assert front == sorted(front), "waiting requests are out of order"
        behind = [self._see(one).order for one in queue]
        assert queue.num_overdue or not front or front[0] == min(behind), "another request should be the first"
        is_guarded = self.scheduler.policy.can_starve and self.config.starvation_ms
        short_pass = not self._seals and self.config.short_prompt_share
        if self.setting.prefix_caching or is_guarded or short_pass:
            return
        self.events["order counted"] += bool(entered)
        for one in entered:
            order = (before.waiting.get(one) or before.running[one]).order
            for other in queue:
                if other in before.waiting and before.waiting[other].order < order:
                    self._num_passed[other] = self._num_passed.get(other, 0) + 1
                    self.events["passed"] += 1
                    most = self.config.max_head_skips
                    assert self._num_passed[other] <= most, f"{other} is passed more than {most} times"

    # ---- nothing is left out --------------------------------------------------------------------------------------

    def _check_nothing_is_left_out(
        self, before: Before, output: SchedulerOutput, preempted: list[Request], entered: list[Request]
    ) -> None:
        """A seat with room for the first in the queue is not left empty while the step has tokens left; and who enters
        leaves the blocks that were promised to others, and a spare one for each."""
        scheduler, kv_cache = self.scheduler, self.scheduler.kv_cache
        if entered and not preempted:
            num_spare = 0 if kv_cache.reserve_tokens else len(scheduler.running) - 1
            num_free = kv_cache.num_available_blocks - kv_cache.num_promised_blocks
            assert num_free >= num_spare, "a request enters into blocks that others need"
        first = scheduler.waiting.peek(0)
        has_seat = scheduler.num_in_batch < self.config.max_num_seqs
        has_tokens = output.num_scheduled_tokens < self.config.max_num_batched_tokens
        if first is None or not has_seat or not has_tokens or self._is_slow or preempted:
            return
        if self._seals and not before.is_open and (before.num_in_batch or any(one.is_fork for one in entered)):
            return
        num_left = self.config.max_num_batched_tokens - output.num_scheduled_tokens
        if not self._is_chunked and output.scheduled:
            decodes = self._computed(output) & before.running.keys()
            if (self.config.prefill_mode == "decode-first" and decodes) or first.num_tokens > num_left:
                return  # it has to wait, or its prompt is too long for the rest of the step
        if self.config.batching == "dynamic" and not before.num_in_batch and not entered:
            self._check_window(before)
            return
        others = [one for one in (*self._members, *entered) if not one.is_fork]
        if self.config.batching == "dynamic" and len({_length_class(one) for one in (first, *others)}) > 1:
            return
        can_enter = not first.num_pending_tokens and not kv_cache.should_wait(first)
        num_spare_blocks = len(scheduler.running)
        assert not (can_enter and kv_cache.can_admit(first, num_spare_blocks=num_spare_blocks)), (
            f"{first} could have entered"
        )

    # ---- sealed batches -------------------------------------------------------------------------------------------

    def _check_window(self, before: Before) -> None:
        """A batch of dynamic batching that has not started: it is not full, and its first has not waited enough."""
        first = min(before.waiting, key=lambda one: one.arrival_index)
        window_s = self.config.batch_window_ms / 1e3
        num_alike = sum(_length_class(one) == _length_class(first) for one in before.waiting)
        assert first.num_pending_tokens or num_alike < self.config.max_num_seqs, "a full batch does not start"
        assert first.num_pending_tokens or first.arrival_s + window_s > before.now_s, "a batch starts too late"

    def _check_sealed(
        self, before: Before, output: SchedulerOutput, preempted: list[Request], entered: list[Request]
    ) -> None:
        """Requests enter only while the batch is being formed; but forks, whose beams are in it."""
        others = [one for one in entered if not one.is_fork]
        if before.num_in_batch and not before.is_forming:
            assert not others, f"{others} enter a sealed batch"
        if self.config.batching == "dynamic" and others:
            self._check_dynamic(before, others)
        self._members += others
        assert not self._done & self._computed(output), "a request computes after its last token"
        self._is_open = False
        is_full = output.num_scheduled_tokens == self.config.max_num_batched_tokens or self._is_slow
        if not self._is_chunked:
            computed = self._computed(output)
            decodes = any(before.running[one].num_remaining == 1 for one in computed & before.running.keys())
            if self.config.prefill_mode == "decode-first" and (decodes or preempted):
                return  # prompts have to wait
            is_full = not decodes
        if preempted and not entered:
            return
        has_seat = self.scheduler.num_in_batch < self.config.max_num_seqs
        was_open = before.is_forming or (not before.num_in_batch and bool(others))
        self._is_forming = was_open and is_full and has_seat and len(self.scheduler.waiting) > 0
        self._is_open = self._is_forming and self._is_chunked and not preempted
        self.events["still forming"] += self._is_forming

    @property
    def _is_slow(self) -> bool:
        return self.config.target_itl_ms > 0 or self.config.scheduling_policy in LIMITED

    def _check_dynamic(self, before: Before, others: list[Request]) -> None:
        """A batch starts when it is full or when its first has waited long enough, and is of about one length."""
        members = [*self._members, *others]
        sizes = [_size(one) for one in members]
        assert max(sizes) < 2 * min(sizes) or max(sizes) <= 1, "a batch of different lengths"
        if before.num_in_batch:
            return
        first = min((one for one in before.waiting if not one.is_fork), key=lambda one: one.arrival_index)
        num_alike = sum(not one.is_fork and _length_class(one) == _length_class(first) for one in before.waiting)
        has_waited = first.arrival_s + self.config.batch_window_ms / 1e3 <= before.now_s
        assert num_alike >= self.config.max_num_seqs or has_waited, "a batch starts too early"
        assert _length_class(first) == _length_class(others[0]), "a batch starts without the first that came"
        self.events["started full"] += num_alike >= self.config.max_num_seqs and not has_waited
        self.events["started late"] += has_waited

    # ---- results and ends -----------------------------------------------------------------------------------------

    def on_landing(self, result: Result) -> None:
        """Tokens are told to requests that live and are not done."""
        for one in result.flight.requests:
            if one.request_id in result.tokens and one in self._told and one not in self._done:
                self._told[one].append(result.tokens[one.request_id])

    def on_landed(self, result: Result, updates: list[RequestUpdate]) -> None:
        """A request has the tokens that were told, and ends with its last one; in a sealed batch, with the batch."""
        failing = {*result.failing, *(result.flight.tokens.keys() - result.tokens.keys())}
        for one in result.flight.requests:
            if one not in self._told or one in self._done:
                continue
            told = self._told[one]
            assert one.output_token_ids == told, f"{one} has other tokens than it was told"
            is_done = bool(told) and ((told[-1] == STOP_TOKEN and one.stop_token_ids) or len(told) == _most_tokens(one))
            if one.request_id in failing:
                assert one.status is RequestStatus.FINISHED_ERROR, f"{one} has failed"
            elif is_done and self._seals and not one.is_beam and not one.status.is_finished:
                assert one.status is RequestStatus.HELD, f"{one} is done and goes on"
                self._done.add(one)
            else:
                assert bool(is_done) == one.status.is_finished, f"{one} has ended too early, or not at all"
        self._check_held_end_together(updates)

    def on_released(self, updates: list[RequestUpdate]) -> None:
        self._check_held_end_together(updates)

    def on_aborted(self, name: str) -> None:
        self._forget_ended()

    def _check_held_end_together(self, updates: list[RequestUpdate]) -> None:
        ended = {self.requests[update.request_id] for update in updates if update.finish_status is not None}
        if ended & self._done:
            assert not self.scheduler.running, "a request leaves a sealed batch that still runs"
            assert self._done <= ended | {one for one in self._done if one.status.is_finished}, "some are left behind"
            self.events["batch done"] += 1
        if self._seals:
            in_batch = [one for one in ended if one.status is not RequestStatus.FINISHED_ERROR and not one.is_beam]
            never_held = [one for one in in_batch if one not in self._done and not one.num_preemptions]
            assert not (never_held and self.scheduler.running), "a request leaves its batch before the others"
        for update in updates:
            if update.finish_status is not None:
                assert self.requests[update.request_id].output_token_ids == self._told[self.requests[update.request_id]]
        num_held = self.scheduler.num_in_batch - len(self.scheduler.running)
        self._forget_ended()
        assert num_held == len(self._done), "a seat is held for a request that is not done, or none for one that is"
        self.events["held"] += num_held

    def _forget_ended(self) -> None:
        for one in [one for one in self._told if one.status.is_finished]:
            del self._told[one]
            self._done.discard(one)
            self._num_passed.pop(one, None)
            self._displaced_for.pop(one, None)


def _most_tokens(request: Request) -> int:
    return request.max_total_tokens - request.num_prompt_tokens


def _size(request: Request) -> int:
    """Tokens of prompt and predicted answer."""
    return request.num_prompt_tokens + int(request.options.predicted_tokens or 0)


def _length_class(request: Request) -> int:
    """From each power of two to before the next."""
    size, number = _size(request), 0
    while 2 ** (number + 1) <= size:
        number += 1
    return number
