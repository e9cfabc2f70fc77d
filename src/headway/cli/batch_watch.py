"""Collects what the batch view shows, from one step report after another. Nothing is drawn here."""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.engine.step_report import StepReport, StepRow
    from headway.outputs import RequestOutput

HISTORY_STEPS = 400


class Cell(enum.Enum):
    """What one request did in one step."""

    ABSENT = "absent"
    WAITING = "waiting"
    CHUNK = "chunk"
    DECODE = "decode"
    IDLE = "idle"  # running, but the step's budget was used up before its turn
    PREEMPTED = "preempted"


class State(enum.Enum):
    """The state of a request, as the view names it."""

    EXPECTED = "expected"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    DONE = "done"


@dataclass
class WatchedRequest:
    """One request's row of the view."""

    name: str
    max_tokens: int
    state: State = State.EXPECTED
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    arrived_s: float = 0.0
    first_token_s: float | None = None
    cells: deque[Cell] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))

    @property
    def is_live(self) -> bool:
        return self.state not in (State.EXPECTED, State.DONE)


@dataclass(frozen=True)
class Summary:
    """The numbers at the end. Rates are over the time spent in steps, so watching does not slow them."""

    num_requests: int
    num_steps: int
    elapsed_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    mean_batch_size: float
    mean_kv_waste: float
    num_preemptions: int
    num_mixed_steps: int
    ttft_p50_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def total_tokens_per_s(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.elapsed_s if self.elapsed_s else 0.0


class BatchWatch:
    """Follows a fixed list of requests from step to step."""

    def __init__(self, requests: Iterable[WatchedRequest], *, token_budget: int) -> None:
        self.requests = {request.name: request for request in requests}
        self.token_budget = token_budget
        self.report: StepReport | None = None
        self.block_owners: Mapping[int, str] = {}
        self.cached_blocks: Collection[int] = ()
        self.elapsed_s = 0.0
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_mixed_steps = 0
        self._batch_sizes: list[int] = []
        self._kv_waste: list[float] = []

    def arrived(self, name: str, *, num_prompt_tokens: int) -> None:
        """A request has just been queued."""
        request = self.requests[name]
        request.state = State.WAITING
        request.num_prompt_tokens = num_prompt_tokens
        request.arrived_s = self.elapsed_s

    def stepped(
        self,
        report: StepReport,
        outputs: Sequence[RequestOutput],
        block_tables: Mapping[str, Sequence[int]],
        cached_blocks: Collection[int] = (),
    ) -> None:
        """Record one step: its report, the outputs it changed, the owner of each block after it, and which other blocks
        the prefix cache keeps."""
        self.report = report
        self.num_steps += 1
        self.elapsed_s += report.duration_s
        self.num_preemptions += len(report.preempted)
        self.block_owners = {block: name for name, table in block_tables.items() for block in table}
        self.cached_blocks = cached_blocks
        self._count_step(report)
        rows = {row.request_id: row for row in report.rows}
        for request in self.requests.values():
            request.cells.append(self._advance(request, rows.get(request.name), report))
        for output in outputs:
            self._take_output(self.requests[output.request_id], output)

    def _count_step(self, report: StepReport) -> None:
        self._batch_sizes.append(len(report.rows))
        if report.num_allocated_slots:
            self._kv_waste.append(1 - report.num_used_slots / report.num_allocated_slots)
        kinds = {row.is_decode for row in report.rows}
        self.num_mixed_steps += len(kinds) == 2

    def _advance(self, request: WatchedRequest, row: StepRow | None, report: StepReport) -> Cell:
        """Update a request's state. Returns the new cell of its strip: what it did in the step."""
        if row is not None:
            if row.num_output_tokens == 0 and row.num_cached_tokens:
                request.num_cached_tokens = row.num_cached_tokens
            request.num_computed_tokens = row.num_computed_tokens + row.num_tokens
            request.state = State.DECODE if row.is_decode else State.PREFILL
            return Cell.DECODE if row.is_decode else Cell.CHUNK
        if request.name in report.preempted:
            request.state = State.PREEMPTED
            request.num_computed_tokens = 0
            return Cell.PREEMPTED
        if request.state in (State.WAITING, State.PREEMPTED):
            return Cell.WAITING
        return Cell.IDLE if request.is_live else Cell.ABSENT

    def _take_output(self, request: WatchedRequest, output: RequestOutput) -> None:
        completion = output.outputs[0]
        request.num_output_tokens = len(completion.token_ids)
        request.text = completion.text
        if request.first_token_s is None and request.num_output_tokens:
            request.first_token_s = self.elapsed_s
        if output.finished:
            request.state = State.DONE
            request.finish_reason = completion.finish_reason

    @property
    def current_kv_waste(self) -> float:
        """Share of the allocated slots that held nothing in the last step."""
        return self._kv_waste[-1] if self._kv_waste else 0.0

    def count(self, *states: State) -> int:
        """How many requests are in one of `states`."""
        return sum(request.state in states for request in self.requests.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests.values())

    def summary(self) -> Summary:
        """The numbers so far."""
        waits = [r.first_token_s - r.arrived_s for r in self.requests.values() if r.first_token_s is not None]
        return Summary(
            num_requests=self.count(State.DONE),
            num_steps=self.num_steps,
            elapsed_s=self.elapsed_s,
            num_prompt_tokens=sum(request.num_prompt_tokens for request in self.requests.values()),
            num_cached_tokens=sum(request.num_cached_tokens for request in self.requests.values()),
            num_output_tokens=self.num_output_tokens,
            mean_batch_size=statistics.fmean(self._batch_sizes) if self._batch_sizes else 0.0,
            mean_kv_waste=statistics.fmean(self._kv_waste) if self._kv_waste else 0.0,
            num_preemptions=self.num_preemptions,
            num_mixed_steps=self.num_mixed_steps,
            ttft_p50_s=statistics.median(waits) if waits else 0.0,
        )
