"""What one step brought (`EngineStep`), and what it did (`StepReport`: demo, live page, benchmarks, logs).

Few steps are watched, so a report only keeps what is gone later; its rows are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from headway.core import RequestUpdate
from headway.core.scheduler_output import BatchSnapshot
from headway.outputs import RequestOutput, SilentProgress


class StepRow(NamedTuple):
    """One request's part in a step."""

    request_id: str
    num_tokens: int
    """Tokens computed for it in this step."""
    num_computed_tokens: int
    """Tokens it had in the cache before the step."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens it had generated before the step; one that the step before was still sampling is counted."""
    num_blocks: int
    """KV blocks it holds during the step."""
    num_cached_tokens: int = 0
    """If it entered the batch with this step: how many of its tokens were in the cache by then."""
    num_drafts: int = 0
    """Of the tokens computed, those that were guessed."""
    num_accepted: int = 0
    """Of these, right ones that the request took."""

    @property
    def is_decode(self) -> bool:
        """One token, fed back from the step before, and guesses of those after it; anything else is a chunk of tokens
        that are already known."""
        return self.num_tokens == 1 + self.num_drafts and self.num_computed_tokens >= self.num_prompt_tokens


@dataclass(frozen=True, eq=False)
class StepReport:
    """The batch during one step. Blocks and slots are as they were while it ran, before any request left."""

    snapshot: BatchSnapshot
    updates: Sequence[RequestUpdate]
    duration_s: float
    """From the result before this one, or from the step's own start if that came later, to its result: the device's
    time for the step, also when steps overlap."""
    schedule_s: float
    """How long the host planned steps since the report before; where steps overlap, these were later ones."""
    num_blocks: int
    block_size: int
    error: str | None = None
    """Why the step as a whole failed, and with it every request in it. What befell one of its requests is in that one's
    update."""

    @property
    def step_id(self) -> int:
        """Steps are numbered from 0."""
        return self.snapshot.output.step_id

    @cached_property
    def rows(self) -> tuple[StepRow, ...]:
        """What each scheduled request did."""
        snapshot = self.snapshot
        num_cached = {new.request_id: new.num_computed_tokens for new in snapshot.output.new_requests}
        num_new = {update.request_id: len(update.new_token_ids) for update in self.updates if update.new_token_ids}
        return tuple(
            StepRow(
                request_id=share.request_id,
                num_tokens=share.num_tokens,
                num_computed_tokens=share.num_computed_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=num_tokens - share.samples - len(share.drafts) - request.num_prompt_tokens,
                num_blocks=-(-(share.num_computed_tokens + share.num_tokens) // self.block_size),
                num_cached_tokens=num_cached.get(share.request_id, 0),
                num_drafts=len(share.drafts),
                num_accepted=max(0, num_new.get(share.request_id, 0) - 1) if share.drafts else 0,
            )
            for share, request, num_tokens in zip(
                snapshot.output.scheduled, snapshot.requests, snapshot.num_tokens, strict=True
            )
        )

    @property
    def num_running(self) -> int:
        """Requests in the batch, whether or not the step had a share for them."""
        return self.snapshot.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self.snapshot.num_waiting

    @property
    def num_used_blocks(self) -> int:
        """KV blocks that a request held."""
        return self.snapshot.num_used_blocks

    @property
    def num_used_slots(self) -> int:
        """KV slots that hold a token; the rest of the used blocks is waste."""
        return self.snapshot.num_used_slots

    @property
    def num_allocated_slots(self) -> int:
        """Room for tokens in the used blocks."""
        return self.snapshot.num_used_blocks * self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return self.snapshot.output.num_scheduled_tokens

    @property
    def preempted(self) -> tuple[str, ...]:
        """Requests that had to leave the batch for this step."""
        return self.snapshot.output.preempted_request_ids

    @cached_property
    def finished(self) -> tuple[str, ...]:
        """Requests that this step's tokens ended."""
        return tuple(update.request_id for update in self.updates if update.finish_status is not None)


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What one call of `LLMEngine.step()` brought."""

    outputs: list[RequestOutput]
    """Of requests that changed; unless they are deltas, text and token ids are cumulative."""
    errors: dict[str, str]
    """By id of the requests among `outputs` of which a completion has failed, now or before: why."""
    progress: dict[str, SilentProgress]
    """By id, of requests that give no output before their end."""
    begun: list[str]
    """Requests that were launched for the first time."""
    report: StepReport
