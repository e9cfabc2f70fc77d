"""Runs planned steps: keep the rows up to date, stage the step, run the model to the logits, sample.

    submit       changes · stage · forward (ends at the logits) · sample · copy the tokens back
    forward      the same in two calls, where masks come in between
    result       wait for that copy

The skeleton is the same everywhere. A `Stage` says where rows lie and how a step runs forward: at once on the CPU
(`eager_runner.py`), or queued on a GPU (`graphed_runner.py`), where nothing here waits for the device, the next step is
queued behind this one, and finds its tokens in the rows, where the sampler puts them.
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
from headway.transfer.block_store import BlockTransfers
from headway.transfer.host_blocks import HostBlocks, apply_moves

logger = logging.getLogger(__name__)


class StepRunner(Generic[StagedStep]):
    """One model over its KV cache, perhaps a second one that guesses for it, and the rows of the requests that are in
    the batch: a `Runner`."""

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
        self.transfers: BlockTransfers | None = None
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
        # Each thread has a current device of its own; steps belong to that of the thread that has made the runner.
        self._cuda_device = torch.cuda.current_device() if settings.device.type == "cuda" else None
        self._unseated: dict[str, str] = {}  # requests that could not enter, and why, until they leave
        self._is_shut_down = False

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step, or queue it on the device."""
        with self._here():
            return self._sample(self._forward(output), None)

    def forward(self, output: SchedulerOutput) -> UnsampledTokens:
        """Run a step, or queue it, up to the logits: tokens wait for masks."""
        with self._here():
            return UnsampledTokens(self, self._forward(output))

    def sample(self, step: ForwardStep, masks: TokenMasks | None) -> PendingTokens:
        """Choose the tokens of the step that was forwarded last."""
        with self._here():
            return self._sample(step, masks)

    def move(self, moves: BlockMoves) -> None:
        """Make the copies of these moves, behind what is queued."""
        with self._here():
            apply_moves(self._kv_caches, self._host_blocks, moves)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """The runner's own device and threads; the rest of the process may want others."""
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
        """Prepare the kinds of steps that there are, while nothing is in flight."""
        num_kinds = self.stage.warm_up() + (0 if self._drafter is None else self._drafter.stage.warm_up())
        if num_kinds and self._verifies_drafts:
            self._sampler.warm_up(self.decoder.embedding.dtype)
        return num_kinds

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        self._is_shut_down = True
        self.transfers = None
        del self.decoder, self.attention, self.stage, self._stages, self._sampler, self._host_blocks, self._drafter
        del self._kv_caches

    # ---- the batch ------------------------------------------------------------------------------------------------

    def _forward(self, output: SchedulerOutput) -> ForwardStep:
        self._apply_changes(output)
        if not self._unseated:
            return self._run(output)
        step = self._run(output.without(self._unseated))
        # Where steps overlap, this one may have been planned before the scheduler knew of the failure.
        failed = {
            share.request_id: SampledTokens((), error=self._unseated[share.request_id])
            for share in output.scheduled
            if share.request_id in self._unseated
        }
        return dataclasses.replace(step, failed=failed)

    def _apply_changes(self, output: SchedulerOutput) -> None:
        """Requests that left free their rows, blocks are moved, and requests that enter get rows.

        Rows are freed first, whatever fails later: the scheduler tells only once which requests have left.
        """
        for request_id in (*output.finished_request_ids, *output.preempted_request_ids):
            self._rows.free(request_id)
            self._unseated.pop(request_id, None)
        if output.moves.has_copies:
            apply_moves(self._kv_caches, self._host_blocks, output.moves)
        if output.new_requests:
            self._seat(output.new_requests)

    def _seat(self, requests: Sequence[NewRequest]) -> None:
        """All at once, with few copies; if that does not work, one by one, and those that do not fit fail alone."""
        try:
            self._enter(requests)
        except Exception as error:
            if len(requests) > 1:
                for request in requests:
                    self._seat([request])
                return
            # The edge should let nothing through that does not fit, so it is logged in full.
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
            return ForwardStep(step, self.stage.forward(staged), num_prepared, {})
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
        )


def _line_masks(masks: TokenMasks, request_ids: Sequence[str], drafts: StepDrafts | None) -> LineMasks | None:
    """By the lines of a step; a request that is not in it has failed to enter."""
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
    """A step that has come, or been queued, as far as its logits. `rows` is None where nothing was computed."""

    rows: StepRows | None
    logits: Tensor | None
    num_prepared: int
    """Before it."""
    prompt_logprobs: dict[str, PromptLogprobs]
    pooled: dict[str, PooledPrompt] = field(default_factory=dict)
    failed: dict[str, SampledTokens] = field(default_factory=dict)
    """Of requests that could not enter the batch."""


class UnsampledTokens:
    """A step whose tokens wait for masks."""

    def __init__(self, runner: StepRunner[Any], step: ForwardStep) -> None:
        self._runner = runner
        self._step = step

    def sample(self, masks: TokenMasks) -> PendingTokens:
        """Choose them."""
        return self._runner.sample(self._step, masks)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """A submitted step. `done` is reached when its tokens are on the host; `None`: they are there."""

    done: torch.cuda.Event | None
    sampled_request_ids: list[str]
    sample: PendingSample | None
    stages: Sequence[Stage[Any]]
    num_prepared: int
    """By them, before it: if there are more now, it may have waited for one, its own or that of a step behind it."""
    prompt_logprobs: dict[str, PromptLogprobs]
    pooled: dict[str, PooledPrompt] = field(default_factory=dict)
    failed: dict[str, SampledTokens] = field(default_factory=dict)
    """Of requests that could not enter the batch."""

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
        return ModelRunnerOutput(sampled, self.prompt_logprobs, self.pooled, has_prepared)


def _num_prepared(stages: Sequence[Stage[Any]]) -> int:
    return sum(stage.num_prepared for stage in stages)


def _verified(request_ids: Sequence[str], chosen: SamplerOutput, num_lines: Sequence[int]) -> dict[str, SampledTokens]:
    """By request, the tokens of its lines up to the first guess that was wrong. If none can be chosen at a place, those
    before it come out, and the place is reached again in the next step."""
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
