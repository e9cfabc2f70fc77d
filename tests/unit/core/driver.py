"""A scheduler with an instant model behind it, for tests that look at schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from headway.config import SchedulerConfig
from headway.core import (
    KVCacheManager,
    ModelRunnerOutput,
    PrefixCache,
    Request,
    RequestUpdate,
    SampledTokens,
    Scheduler,
    SchedulerOutput,
    check_invariants,
)
from headway.core.create import scheduler_of
from headway.core.request_options import RequestOptions


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    prefix_cache: PrefixCache | None = None,
    reserve_tokens: int = 0,
    **options: object,
) -> Scheduler:
    """Small limits unless the test says otherwise."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16} | options
    kv_cache = KVCacheManager(
        num_blocks=num_blocks, block_size=block_size, prefix_cache=prefix_cache, reserve_tokens=reserve_tokens
    )
    return scheduler_of(SchedulerConfig(**options).resolve("cpu"), kv_cache)


def request(name: str, num_prompt_tokens: int, max_tokens: int = 8, **options: object) -> Request:
    return make_request(name, range(num_prompt_tokens), max_tokens=max_tokens, **options)


OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(RequestOptions))


def make_request(name: str, prompt_token_ids: Sequence[int], *, max_tokens: int, **given: Any) -> Request:
    """A request whose options, and whatever else it is made with, are given flat."""
    options = {key: given.pop(key) for key in list(given) if key in OPTION_NAMES}
    return Request(name, prompt_token_ids, max_tokens=max_tokens, options=RequestOptions(**options), **given)


def finish(
    scheduler: Scheduler, output: SchedulerOutput, token: int = 0, duration_s: float | None = None
) -> list[RequestUpdate]:
    """Answer a planned step with the same token for everybody who samples."""
    sampled = {s.request_id: SampledTokens((token,)) for s in output.scheduled if s.samples}
    updates = scheduler.update(output, ModelRunnerOutput(sampled, {}), duration_s=duration_s)
    check_invariants(scheduler)
    return updates


def step(scheduler: Scheduler, token: int = 0) -> dict[str, int]:
    """One whole step; returns who computed how many tokens."""
    output = scheduler.schedule()
    check_invariants(scheduler)
    finish(scheduler, output, token)
    return {s.request_id: s.num_tokens for s in output.scheduled}


def schedule_rows(scheduler: Scheduler, arrivals: dict[int, list[Request]], step_s: float = 0.0) -> dict[str, str]:
    """The whole schedule, a row for each request and a column for each step: how many tokens it computes there, `*` if
    that yields a token, `-` if it is preempted. Between two steps `step_s` pass."""
    steps: list[dict[str, str]] = []
    while scheduler.has_unfinished_requests or len(steps) <= max(arrivals):
        now_s = len(steps) * step_s
        for arrival in arrivals.get(len(steps), []):
            scheduler.add_request(arrival, now_s=now_s)
        output = scheduler.schedule(now_s=now_s)
        check_invariants(scheduler)
        steps.append({s.request_id: f"{s.num_tokens}{'*' if s.samples else ''}" for s in output.scheduled})
        steps[-1] |= dict.fromkeys(output.preempted_request_ids, "-")
        if not output.is_empty:
            finish(scheduler, output)
        assert len(steps) < 200
    names = dict.fromkeys(name for planned in steps for name in planned)
    width = max(len(cell) for planned in steps for cell in planned.values())
    return {name: " ".join(f"{planned.get(name, '.'):<{width}}" for planned in steps).rstrip(" .") for name in names}
