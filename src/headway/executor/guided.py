"""Runs steps with guided requests: up to the logits at once, then sampling when the masks of allowed tokens are ready.

    engine     submit 1 · result 0 · update │ outputs of 0 · plan 2 │ submit 2 ...
    guides                         begin ───┴── masks of step 1 ──┐ │
    device     ───────── forward of step 1 ──────────────────────── sample 1 · forward of step 2 ──

A mask depends on all tokens of its request, so the masks of a step can only be begun when the results of earlier steps
have been processed. They are begun at once if no token of its requests is pending, otherwise by `results_taken` or when
the step has to sample. Threads compute them. The step samples before the next one is submitted, or when its result is
asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, SampledTokens, SchedulerOutput
from headway.executor import FailedStep, MaskedExecutor, PendingStep, UnsampledStep
from headway.structured.guides import GuidedShare, GuidedStep, GuideEnd, Guides
from headway.tracing import span

_MAX_IN_FLIGHT = 2
"""No step may be queued after one that waits for masks, as it would read tokens that are not sampled yet."""


class GuidedExecutor:
    """Passes steps without guided requests to the executor, and splits the others into forward and sampling."""

    def __init__(self, executor: MaskedExecutor, guides: Guides) -> None:
        self.max_in_flight = min(executor.max_in_flight, _MAX_IN_FLIGHT)
        self.verifies_ahead = executor.verifies_ahead
        self.transfers = executor.transfers
        self._executor = executor
        self._guides = guides
        self._unsampled: _MaskedStep | None = None

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start a step, after the previous one has sampled."""
        if self._unsampled is not None:
            self._unsampled.sample()
            self._unsampled = None
        if not self._guides.live or not (shares := self._guides.shares(output.scheduled)):
            return self._executor.submit(output)
        step = _MaskedStep(self._guides, shares)
        if all(share.is_next for share in shares):
            step.begin_masks()
        step.unsampled = self._executor.forward(output)
        self._unsampled = step
        return step

    def results_taken(self) -> None:
        """Begin the masks of the last step. Called when the results of all earlier steps have been processed, with
        other work still to do while masks are computed."""
        self._guides.forget_finished()
        if self._unsampled is not None:
            self._unsampled.begin_masks()

    def move(self, moves: BlockMoves) -> None:
        """Copy blocks without a step."""
        self._executor.move(moves)

    def warm_up(self) -> int:
        """Prepare what would slow down the first steps."""
        return self._executor.warm_up()

    def shutdown(self) -> None:
        """Free the executor."""
        self.transfers = None
        self._executor.shutdown()


class _MaskedStep:
    """A step that runs up to its logits and samples later, once."""

    def __init__(self, guides: Guides, shares: Sequence[GuidedShare]) -> None:
        self.unsampled: UnsampledStep | None = None
        self._guides = guides
        self._shares = shares
        self._masks: Future[GuidedStep] | None = None
        self._ends: Sequence[GuideEnd] = ()
        self._sampled: PendingStep = FailedStep(KeyboardInterrupt())  # until sampling has set it

    def begin_masks(self) -> Future[GuidedStep]:
        """Begin to compute the masks in threads, unless that was done."""
        if self._masks is None:
            self._masks = self._guides.begin(self._shares)
        return self._masks

    def sample(self) -> None:
        """Wait for the masks and sample. Errors are raised by `result`."""
        unsampled, self.unsampled = self.unsampled, None
        if unsampled is None:
            return
        try:
            with span("masks"):
                found = self.begin_masks().result()
            with span("sample"):
                self._sampled = unsampled.sample(found.masks)
            self._ends = found.ends
        except Exception as error:
            self._sampled = FailedStep(error)

    def result(self) -> ModelRunnerOutput:
        """Wait for the step."""
        self.sample()
        result = self._sampled.result()
        return _with_ends(result, self._ends) if self._ends else result


def _with_ends(result: ModelRunnerOutput, ends: Sequence[GuideEnd]) -> ModelRunnerOutput:
    """Replace the samples of requests whose guides end them: these fail or stop instead."""
    failed = {end.request_id: SampledTokens((), error=end.error) for end in ends if end.error is not None}
    stopped = frozenset(end.request_id for end in ends if end.error is None)
    return dataclasses.replace(result, sampled={**result.sampled, **failed}, stopped=stopped)
