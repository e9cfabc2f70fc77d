"""Records of one step: its outputs (`EngineStep`), and what it did (`StepReport`, for the console, benchmarks, logs).

Few steps are watched, so a report only keeps what cannot be recovered later. Its rows are computed on demand.
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
    """Tokens it had generated before the step, including one that the previous step was still sampling."""
    num_blocks: int
    """KV blocks it holds during the step."""
    num_cached_tokens: int = 0
    """If it entered the batch with this step, the number of its tokens found in the cache; otherwise 0."""
    num_drafts: int = 0
    """Draft tokens among the tokens computed."""
    num_accepted: int = 0
    """Draft tokens that were accepted."""

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode: the token sampled before, with any draft tokens. Anything else is a chunk of known
        tokens."""
        return self.num_tokens == 1 + self.num_drafts and self.num_computed_tokens >= self.num_prompt_tokens


@dataclass(frozen=True, eq=False)
class StepReport:
    """The batch during one step. Blocks and slots are as they were while it ran, before any request left."""

    snapshot: BatchSnapshot
    updates: Sequence[RequestUpdate]
    duration_s: float
    """The device's time for the step, also when steps overlap: from the previous result, or from the step's own start
    if that was later, to its result."""
    schedule_s: float
    """The host's planning time since the previous report. Where steps overlap, it went into later steps."""
    num_blocks: int
    block_size: int
    busy_s: float = 0.0
    """As `duration_s`, without the time in which the host prepared the step while nothing ran."""
    host_wait_s: float = 0.0
    """How long the device had waited for this step, while requests were ready."""
    num_padding_tokens: int = 0
    """Tokens that were computed only to fill the batch up to the size of a graph."""
    error: str | None = None
    """Why the step as a whole failed, and every request in it. The error of a single request is in its update."""

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
        """Requests in the batch, whether or not the step computed tokens for them."""
        return self.snapshot.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self.snapshot.num_waiting

    @property
    def num_used_blocks(self) -> int:
        """KV blocks held by requests."""
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
        """Ids of requests preempted for this step."""
        return self.snapshot.output.preempted_request_ids

    @cached_property
    def finished(self) -> tuple[str, ...]:
        """Ids of requests that ended with this step."""
        return tuple(update.request_id for update in self.updates if update.finish_status is not None)


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The result of one call of `LLMEngine.step()`."""

    outputs: list[RequestOutput]
    """The outputs of requests that changed. Text and token ids are cumulative unless the output is a delta."""
    errors: dict[str, str]
    """By request id: why a completion has failed, in this step or an earlier one. Only for requests in `outputs`."""
    progress: dict[str, SilentProgress]
    """By request id, for requests that give no output before their end."""
    begun: list[str]
    """Requests that were launched for the first time."""
    report: StepReport
