"""What one step did, for people and programs that watch: demo, live page, benchmarks, logs."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core import Scheduler, SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's part in a step."""

    request_id: str
    num_tokens: int
    """Tokens computed for it in this step."""
    num_computed_tokens: int
    """Tokens it had in the cache before the step."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens it had generated before the step."""
    num_blocks: int
    """KV blocks it holds during the step."""

    @property
    def is_decode(self) -> bool:
        """One token, fed back from the step before; anything else is a chunk of tokens that are already known."""
        return self.num_tokens == 1 and self.num_computed_tokens >= self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepReport:
    """The batch during one step. Blocks and slots are as they were while it ran, before anybody left."""

    step_id: int
    duration_s: float
    rows: tuple[StepRow, ...]
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_used_slots: int
    """KV slots that hold a token; the rest of the used blocks is waste."""
    block_size: int
    preempted: tuple[str, ...]
    finished: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_allocated_slots(self) -> int:
        """Room for tokens in the used blocks."""
        return self.num_used_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The state of the scheduler right after it has planned a step: all of a report but the outcome."""

    rows: tuple[StepRow, ...]
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_used_slots: int


def take_snapshot(scheduler: Scheduler, output: SchedulerOutput) -> BatchSnapshot:
    """Cost: proportional to the running requests."""
    kv_cache = scheduler.kv_cache
    rows = []
    for scheduled in output.scheduled:
        request = scheduler.requests[scheduled.request_id]
        rows.append(
            StepRow(
                request_id=scheduled.request_id,
                num_tokens=scheduled.num_tokens,
                num_computed_tokens=scheduled.num_computed_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_blocks=kv_cache.num_blocks_of(scheduled.request_id),
            )
        )
    return BatchSnapshot(
        rows=tuple(rows),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_used_blocks=kv_cache.pool.num_used_blocks,
        num_used_slots=sum(request.num_computed_tokens for request in scheduler.running),
    )
