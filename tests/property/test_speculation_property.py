"""Random requests, guesses that are right as often as it happens, small caches, aborts, every policy and batching: each
request gets the tokens that it would get without guesses, and requests, steps and blocks agree after every call."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from headway.config import BATCHING_MODES, PREFILL_MODES, SCHEDULING_POLICIES, SchedulerConfig
from headway.core import KVCacheManager, PrefixCache, Request, RequestStatus
from headway.core.create import scheduler_of
from headway.core.invariants import check_invariants
from headway.core.proposers import Draft
from headway.core.request_options import RequestOptions
from headway.core.speculation import _Level
from headway.engine.engine_core import EngineCore
from headway.executor.fake import FakeExecutor

VOCAB = 50


def truth(request_id: str, position: int) -> int:
    """The token that a request has at a position."""
    return zlib.crc32(f"{request_id} {position}".encode()) % VOCAB


@dataclass
class RandomGuesses:
    """In place of the n-gram lookup: right with a chance that differs from request to request."""

    rng: random.Random
    made: Counter[str] = field(default_factory=Counter)
    knows_tokens: bool = True

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        count = self.rng.randrange(0, max_tokens + 1)
        if not count:
            return None
        chance = (zlib.crc32(request.request_id.encode()) % 5) / 4
        tokens = []
        for place in range(count):
            right = truth(request.request_id, request.num_known_tokens + place)
            tokens.append(right if self.rng.random() < chance else (right + 1) % VOCAB)
        self.made["drafts"] += 1
        return Draft(tuple(tokens), self.rng.randrange(2, 17))

    def note_verified(self, request: Request) -> None:
        pass

    def forget_finished(self) -> None:
        pass


class Play:
    def __init__(self, seed: int, *, policy: str, batching: str, prefill_mode: str, caches: bool) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 16])
        num_blocks = rng.randrange(60, 160) // block_size + 4
        kv_cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_cache=PrefixCache() if caches else None,
        )
        config = SchedulerConfig(
            scheduling_policy=policy,
            batching=batching,
            prefill_mode=prefill_mode if batching == "continuous" else "chunked",
            max_num_seqs=rng.randrange(1, 9),
            max_num_batched_tokens=rng.randrange(9, 40),
            max_draft_tokens=rng.randrange(1, 7),
            speculation="ngram",
        ).resolve("cpu")
        self.scheduler = scheduler_of(config, kv_cache)
        assert self.scheduler.speculation is not None
        self.guesses = RandomGuesses(rng)
        self.scheduler.speculation._proposer = self.guesses
        self.scheduler.speculation._num_worth = self._num_worth  # type: ignore[method-assign]
        self.now_s = 0.0
        # One step at a time; two, of which the second waits for drafts of the first; two that do not wait.
        executor = FakeExecutor(truth, max_in_flight=2 if seed % 3 else 1, guess=self._guess if seed % 3 == 2 else None)
        self.core = EngineCore(self.scheduler, executor, now=self._now, sleep=self._sleep)
        self.requests: dict[str, Request] = {}
        self.events: Counter[str] = Counter()
        self.capacity = num_blocks * block_size

    def _num_worth(self, levels: Sequence[_Level], *, most: int, **_: object) -> int:
        """Whatever is verified, tokens are the same."""
        return self.rng.randrange(min(sum(level.num_guesses for level in levels), max(most, 0)) + 1)

    def _guess(self, request_id: str, position: int) -> int:
        return truth(request_id, position) if self.rng.random() < 0.6 else VOCAB

    def _now(self) -> float:
        self.now_s += 1e-4
        return self.now_s

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if len(self.scheduler.requests) < 14 and self.rng.random() < 0.35:
                self.add()
            if self.scheduler.requests and self.rng.random() < 0.02:
                name = self.rng.choice(list(self.scheduler.requests))
                self.scheduler.finish_request(name, RequestStatus.FINISHED_ABORTED)
                self.events["aborted"] += 1
                check_invariants(self.scheduler)
            self.step()
        while self.core.has_unfinished_requests:
            self.step()

    def add(self) -> None:
        name = f"r{len(self.requests)}"
        num_prompt, max_tokens = self.rng.randrange(1, 25), self.rng.randrange(1, 30)
        if num_prompt + max_tokens > self.capacity:
            return
        stop = frozenset({truth(name, num_prompt + self.rng.randrange(40))}) if self.rng.random() < 0.3 else frozenset()
        self.requests[name] = request = Request(
            name,
            [truth(name, place) for place in range(num_prompt)],
            max_tokens=max_tokens,
            stop_token_ids=stop,
            min_tokens=self.rng.randrange(0, 3),
            can_draft=self.rng.random() < 0.9,
            options=RequestOptions(priority=self.rng.randrange(-2, 3), tenant=self.rng.choice("ab")),
        )
        self.scheduler.add_request(request, now_s=self.now_s)
        check_invariants(self.scheduler)

    def step(self) -> None:
        self.now_s += 0.01
        step = self.core.step()
        check_invariants(self.scheduler)
        self.events["steps"] += 1
        for output in step.launched:
            self.events["preempted"] += len(output.preempted_request_ids)
            for share in output.scheduled:
                self.events["drafted"] += len(share.drafts)
                assert len(share.drafts) <= self.scheduler.config.max_draft_tokens
                assert not share.drafts or self.requests[share.request_id].can_draft
            assert output.num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        for update in step.updates:
            self.events["several at once"] += len(update.new_token_ids) > 1

    def check(self) -> None:
        for name, request in self.requests.items():
            for place, token in enumerate(request.output_token_ids):
                assert token == truth(name, request.num_prompt_tokens + place), name
            if request.status is RequestStatus.FINISHED_LENGTH:
                assert request.num_known_tokens == request.max_total_tokens
            elif request.status is RequestStatus.FINISHED_STOPPED:
                ends = [
                    place
                    for place, token in enumerate(request.output_token_ids, start=1)
                    if token in request.stop_token_ids and place >= request.min_tokens
                ]
                assert ends == [request.num_output_tokens], "it ends at its first end token"
            else:
                assert request.status is RequestStatus.FINISHED_ABORTED, request
        assert self.scheduler.kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_tokens_do_not_depend_on_guesses(policy: str) -> None:
    """With and without a prefix cache, over 10,000 steps in all."""
    events: Counter[str] = Counter()
    modes = [(batching, mode) for batching in BATCHING_MODES for mode in PREFILL_MODES]
    modes = [(batching, mode) for batching, mode in modes if batching != "dynamic" or policy == "fcfs"]
    for number, (batching, prefill_mode) in enumerate(2 * modes):
        caches = number >= len(modes)
        play = Play(number, policy=policy, batching=batching, prefill_mode=prefill_mode, caches=caches)
        play.play(num_steps=60)
        play.check()
        events.update(play.events)
    assert events["steps"] >= 1_000
    assert events["drafted"] >= 500
    assert events["several at once"] >= 100
    assert events["aborted"] >= 5
