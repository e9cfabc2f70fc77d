"""Runs planned steps: updates the rows, stages the step, runs the model to the logits, and samples.

    submit       changes · stage · forward (ends at the logits) · sample · copy the tokens back
    forward      the same in two calls, if masks are computed in between
    result       wait for that copy

These parts are the same on every device. A `Stage` stores the rows and runs a step's forward pass: at once on the CPU
(`eager_runner.py`), or queued on a GPU (`graphed_runner.py`). On a GPU nothing here waits for the device: the next step
is queued after this one and reads the sampled tokens from the rows, where the sampler writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import (
    ModelRunnerOutput,
    NewRequest,
    PendingStep,
    PooledPrompt,
    PromptLogprobs,
    SampledTokens,
    SchedulerOutput,
)
from headway.runner.base import PagedModel, RunnerSettings
from headway.runner.draft_model import DraftModel
from headway.runner.logit_edits import LineMasks
from headway.runner.prompt_readings import logprobs_of_prompts, pooled_prompts
from headway.runner.rows import RowTable, Stage, StagedStep, StepRows
from headway.runner.sampler import PendingSample, Sampler, SamplerOutput, StepDrafts
from headway.structured.guides import TokenMasks
from headway.transfer.host_blocks import HostBlocks, apply_moves

logger = logging.getLogger(__name__)


class StepRunner(Generic[StagedStep]):
    """A `Runner`: one model over its KV cache, optionally a draft model, and the rows of the requests in the batch."""

    def __init__(
        self,
        model: PagedModel,
        settings: RunnerSettings,
        *,
        rows: RowTable,
        stage: Stage[StagedStep],
        sampler: Sampler,
        drafter: DraftModel[StagedStep] | None = None,
        host_blocks: HostBlocks | None = None,
        verifies_ahead: bool = False,
    ) -> None:
        self.verifies_ahead = verifies_ahead
        self.decoder, self.attention = model
        self.stage = stage
        self._drafter = drafter
        self._stages = (stage,) if drafter is None else (stage, drafter.stage)
        self._kv_caches = list(self.attention.kv_caches)  # of both models
        if drafter is not None:
            self._kv_caches += drafter.model.attention.kv_caches
        self._rows = rows
        self._sampler = sampler
        self._host_blocks = host_blocks
        self._num_threads = settings.num_threads
        self._verifies_drafts = settings.max_num_lines is not None
        # Each thread has its own current device; steps run on that of the thread that made the runner.
        self._cuda_device = torch.cuda.current_device() if settings.device.type == "cuda" else None
        self._unseated: dict[str, str] = {}  # requests that could not enter, and why, until they leave
        self._is_shut_down = False

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step, or queue it on the device."""
        with self._here():
            return self._sample(self._forward(output), None)

    def forward(self, output: SchedulerOutput) -> UnsampledTokens:
        """Run a step, or queue it, up to the logits. Its tokens are sampled later, with masks."""
        with self._here():
            return UnsampledTokens(self, self._forward(output))

    def sample(self, step: ForwardStep, masks: TokenMasks | None) -> PendingTokens:
        """Choose the tokens of the step that `forward` ran last."""
        with self._here():
            return self._sample(step, masks)

    def move(self, moves: BlockMoves) -> None:
        """Copy the blocks of these moves, after the work that is queued."""
        with self._here():
            apply_moves(self._kv_caches, self._host_blocks, moves)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Use the runner's device and number of threads inside the context; other code may use others."""
        if self._is_shut_down:
            raise RuntimeError("the runner is shut down")
        if self._cuda_device is not None and torch.cuda.current_device() != self._cuda_device:
            torch.cuda.set_device(self._cuda_device)
        callers_threads = torch.get_num_threads() if self._num_threads is not None else 0
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                yield
        finally:
            if callers_threads:
                torch.set_num_threads(callers_threads)

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Prepare every kind of step. Called while nothing is in flight; see `Runner.warm_up`."""
        num_kinds = self.stage.warm_up() + (0 if self._drafter is None else self._drafter.stage.warm_up())
        if num_kinds and self._verifies_drafts:
            self._sampler.warm_up(self.decoder.embedding.dtype)
        return num_kinds

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        self._is_shut_down = True
        del self.decoder, self.attention, self.stage, self._stages, self._sampler, self._host_blocks, self._drafter
        del self._kv_caches

    # ---- the batch ------------------------------------------------------------------------------------------------

    def _forward(self, output: SchedulerOutput) -> ForwardStep:
        self._apply_changes(output)
        if not self._unseated:
            return self._run(output)
        step = self._run(output.without(self._unseated))
        # If steps overlap, this one may have been planned before the scheduler knew of the failure.
        failed = {
            share.request_id: SampledTokens((), error=self._unseated[share.request_id])
            for share in output.scheduled
            if share.request_id in self._unseated
        }
        return dataclasses.replace(step, failed=failed)

    def _apply_changes(self, output: SchedulerOutput) -> None:
        """Free the rows of requests that left, move blocks, and give rows to requests that enter.

        Rows are freed first, whatever fails later, because the scheduler reports a request's departure only once.
        """
        for request_id in (*output.finished_request_ids, *output.preempted_request_ids):
            self._rows.free(request_id)
            self._unseated.pop(request_id, None)
        if output.moves.has_copies:
            apply_moves(self._kv_caches, self._host_blocks, output.moves)
        if output.new_requests:
            self._seat(output.new_requests)

    def _seat(self, requests: Sequence[NewRequest]) -> None:
        """Seat all requests at once, with few copies. If that fails, seat them one by one, so only bad ones fail."""
        try:
            self._enter(requests)
        except Exception as error:
            if len(requests) > 1:
                for request in requests:
                    self._seat([request])
                return
            # Validation should have refused a request that does not fit, so the error is logged in full.
            logger.error("request %s cannot enter the batch; it is ended", requests[0].request_id, exc_info=error)
            self._unseated[requests[0].request_id] = f"{type(error).__name__}: {error}"

    def _enter(self, requests: Sequence[NewRequest]) -> None:
        seats = self._rows.seat(requests)
        try:
            blocks = self._rows.append_blocks([(request.request_id, request.block_ids) for request in requests])
            self.stage.seat(seats, blocks)
            self._sampler.seat(seats)
            if self._drafter is not None:
                self._drafter.seat(seats)
        except Exception:
            for request in requests:
                self._rows.free(request.request_id)
            raise

    # ---- a step ---------------------------------------------------------------------------------------------------

    def _run(self, output: SchedulerOutput) -> ForwardStep:
        num_prepared = _num_prepared(self._stages)
        if output.is_empty:
            return ForwardStep(None, None, num_prepared, {})
        step = self._rows.step(output)
        blocks = self._rows.append_blocks(
            [(s.request_id, s.new_block_ids) for s in output.scheduled if s.new_block_ids]
        )
        if self._drafter is not None:
            blocks = self._drafter.run(step, blocks)
        staged = self.stage.stage(step, blocks, exact=bool(self._rows.wanted_prompts))
        if not self._rows.wanted_prompts:
            num_padding_tokens = self.stage.num_padding_tokens(staged)
            return ForwardStep(
                step, self.stage.forward(staged), num_prepared, {}, num_padding_tokens=num_padding_tokens
            )
        hidden = self.stage.hidden(staged)
        wanted = self._rows.wanted_prompts
        found = logprobs_of_prompts(self.decoder, hidden, step, wanted)
        pooled = pooled_prompts(hidden, step, wanted)
        sampled = hidden.index_select(0, torch.from_numpy(step.sample_index).to(hidden.device))
        logits = self.decoder.logits(sampled) if step.sampled else sampled
        return ForwardStep(step, logits, num_prepared, found, pooled)

    def _sample(self, forwarded: ForwardStep, masks: TokenMasks | None) -> PendingTokens:
        step, logits = forwarded.rows, forwarded.logits
        sample, request_ids = None, []
        if step is not None and step.sampled:
            assert logits is not None
            request_ids = [step.request_ids[place] for place in step.sampled]
            lines = None if masks is None else _line_masks(masks, request_ids, step.drafts)
            sample = self._sampler.sample(logits, step.sample_rows, step.sample_positions, lines, step.drafts)
        done = None
        if self._cuda_device is not None:
            done = torch.cuda.Event()
            done.record()
        return PendingTokens(
            done,
            request_ids,
            sample,
            self._stages,
            forwarded.num_prepared,
            forwarded.prompt_logprobs,
            forwarded.pooled,
            forwarded.failed,
            forwarded.num_padding_tokens,
        )


def _line_masks(masks: TokenMasks, request_ids: Sequence[str], drafts: StepDrafts | None) -> LineMasks | None:
    """The masks by line of the step. A masked request that is not in the step failed to enter the batch."""
    first_lines = range(len(request_ids)) if drafts is None else (drafts.num_lines.cumsum() - drafts.num_lines).tolist()
    places = dict(zip(request_ids, first_lines, strict=True))
    lines: list[int] = []
    kept: list[int] = []
    number = 0
    for request_id, count in zip(masks.request_ids, masks.num_lines, strict=True):
        if (first := places.get(request_id)) is not None:
            lines += range(first, first + count)
            kept += range(number, number + count)
        number += count
    if not lines:
        return None
    words = masks.bits.view(np.int32)
    return LineMasks(np.asarray(lines, dtype=np.int32), words if len(kept) == len(words) else words[kept])


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """A step that was run or queued up to its logits. `rows` is None if nothing was computed."""

    rows: StepRows | None
    logits: Tensor | None
    num_prepared: int
    """The stage's `num_prepared` before this step."""
    prompt_logprobs: dict[str, PromptLogprobs]
    pooled: dict[str, PooledPrompt] = field(default_factory=dict)
    failed: dict[str, SampledTokens] = field(default_factory=dict)
    """The results of requests that could not enter the batch."""
    num_padding_tokens: int = 0


class UnsampledTokens:
    """A step whose tokens wait for masks."""

    def __init__(self, runner: StepRunner[Any], step: ForwardStep) -> None:
        self._runner = runner
        self._step = step

    def sample(self, masks: TokenMasks) -> PendingTokens:
        """Choose the tokens."""
        return self._runner.sample(self._step, masks)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """A submitted step. The event `done` is reached when its tokens are on the host; `None`: they are already there."""

    done: torch.cuda.Event | None
    sampled_request_ids: list[str]
    sample: PendingSample | None
    stages: Sequence[Stage[Any]]
    num_prepared: int
    """The stages' `num_prepared` before this step. A larger number now means that this step may have waited for a
    preparation, its own or that of a later step."""
    prompt_logprobs: dict[str, PromptLogprobs]
    pooled: dict[str, PooledPrompt] = field(default_factory=dict)
    failed: dict[str, SampledTokens] = field(default_factory=dict)
    """The results of requests that could not enter the batch."""
    num_padding_tokens: int = 0

    def result(self) -> ModelRunnerOutput:
        """Wait for the step."""
        if self.done is not None:
            self.done.synchronize()
        sampled = self.failed.copy()
        if self.sample is not None:
            chosen = self.sample.result()
            if self.sample.num_lines is not None:
                sampled |= _verified(self.sampled_request_ids, chosen, self.sample.num_lines)
                return self._output(sampled)
            for place, request_id in enumerate(self.sampled_request_ids):
                error, logprobs = chosen.errors.get(place), chosen.logprobs[place]
                if error is not None:
                    sampled[request_id] = SampledTokens((), error=error)
                else:
                    sampled[request_id] = SampledTokens(
                        (chosen.token_ids[place],), () if logprobs is None else (logprobs,)
                    )
        return self._output(sampled)

    def _output(self, sampled: dict[str, SampledTokens]) -> ModelRunnerOutput:
        has_prepared = _num_prepared(self.stages) > self.num_prepared
        return ModelRunnerOutput(sampled, self.prompt_logprobs, self.pooled, has_prepared, self.num_padding_tokens)


def _num_prepared(stages: Sequence[Stage[Any]]) -> int:
    return sum(stage.num_prepared for stage in stages)


def _verified(request_ids: Sequence[str], chosen: SamplerOutput, num_lines: Sequence[int]) -> dict[str, SampledTokens]:
    """For each request, the tokens of its lines up to the first wrong draft. If no token can be chosen at a position,
    the tokens before it are returned, and the next step reaches that position again."""
    sampled, start = {}, 0
    for request_id, count in zip(request_ids, num_lines, strict=True):
        lines = range(start, start + count)
        start += count
        if (error := chosen.errors.get(lines[0])) is not None:
            sampled[request_id] = SampledTokens((), error=error)
            continue
        kept = list(itertools.takewhile(lambda line: chosen.token_ids[line] >= 0, lines))
        logprobs = [found for line in kept if (found := chosen.logprobs[line]) is not None]
        sampled[request_id] = SampledTokens(tuple(chosen.token_ids[line] for line in kept), tuple(logprobs))
    return sampled
