"""An executor without a model, for tests and to measure everything but the model. A function gives the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput
from headway.structured.guides import TokenMasks
from headway.transfer.block_store import BlockTransfers

NextToken = Callable[[str, int], int]
"""(request id, number of tokens it has) → the next token."""


class FakeExecutor:
    """Checks the guarantees that a real runner relies on: each plan continues where the last one ended, and results are
    taken in order.

    Tokens are made only when a result is asked for.
    """

    def __init__(
        self,
        next_token: NextToken = lambda request_id, num_tokens: 0,
        *,
        max_in_flight: int = 1,
        guess: NextToken | None = None,
        transfers: BlockTransfers | None = None,
    ) -> None:
        """`guess` makes the draft tokens that a plan leaves open. A step may then be planned before another's drafts
        are verified."""
        self.max_in_flight = max_in_flight
        self.verifies_ahead = guess is not None
        self.transfers = transfers
        self._guess = guess
        self.num_steps = 0
        self._next_token = next_token
        self._num_computed: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}  # of requests in the batch, by the results made so far
        self._in_flight: deque[FakeStep] = deque()

    def submit(self, output: SchedulerOutput) -> FakeStep:
        """Check and record the plan."""
        if len(self._in_flight) >= self.max_in_flight:
            raise RuntimeError(f"{len(self._in_flight) + 1} steps in flight, of at most {self.max_in_flight}")
        self.num_steps += 1
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self._num_computed.pop(request_id, None)
        for new in output.new_requests:
            self._num_computed[new.request_id] = new.num_computed_tokens
        for scheduled in output.scheduled:
            expected = self._num_computed[scheduled.request_id]
            if scheduled.num_computed_tokens != expected:
                raise RuntimeError(
                    f"{scheduled.request_id}: planned from {scheduled.num_computed_tokens}, computed to {expected}"
                )
            self._num_computed[scheduled.request_id] = expected + scheduled.num_tokens
        step = FakeStep(self, output)
        self._in_flight.append(step)
        return step

    def forward(self, output: SchedulerOutput) -> FakeStep:
        """Check and record the plan. Its tokens are made after `FakeStep.sample`."""
        return self.submit(output)

    def move(self, moves: BlockMoves) -> None:
        """Do nothing, as there are no blocks."""

    def warm_up(self) -> int:
        """Return 0, as no kind of step needs preparation."""
        return 0

    def shutdown(self) -> None:
        """Do nothing, as there is nothing to free."""

    def _answer(self, step: FakeStep, output: SchedulerOutput) -> ModelRunnerOutput:
        if not self._in_flight or self._in_flight.popleft() is not step:
            raise RuntimeError(f"the result of step {output.step_id} is taken twice, or before that of an earlier one")
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self._num_tokens.pop(request_id, None)
        for new in output.new_requests:
            self._num_tokens[new.request_id] = len(new.prompt_token_ids) + len(new.output_token_ids)
        sampled = {s.request_id: SampledTokens(self._verified(s)) for s in output.scheduled if s.samples}
        return ModelRunnerOutput(sampled=sampled, prompt_logprobs={})

    def _verified(self, share: ScheduledRequest) -> tuple[int, ...]:
        """The next token and, where drafts are verified, those after it up to the first wrong draft."""
        planned = share.num_computed_tokens + share.num_tokens - len(share.drafts)
        first = self._num_tokens[share.request_id] if self.verifies_ahead else planned
        token_ids = [self._next_token(share.request_id, first)]
        for place, draft in enumerate(share.drafts):
            if draft < 0:
                assert self._guess is not None, "a draft without tokens"
                draft = self._guess(share.request_id, first + place)
            if draft != token_ids[-1]:
                break
            token_ids.append(self._next_token(share.request_id, first + len(token_ids)))
        self._num_tokens[share.request_id] = first + len(token_ids)
        if share.request_id in self._num_computed:
            self._num_computed[share.request_id] -= len(share.drafts) + 1 - len(token_ids)
        return tuple(token_ids)


class FakeStep:
    """A step that runs when its result is asked for."""

    def __init__(self, executor: FakeExecutor, output: SchedulerOutput) -> None:
        self._executor = executor
        self._output = output
        self._masks: TokenMasks | None = None

    def sample(self, masks: TokenMasks) -> FakeStep:
        """Use the masks, so that only allowed tokens are chosen."""
        self._masks = masks
        return self

    def result(self) -> ModelRunnerOutput:
        """Return the tokens. Raises if it is not this step's turn."""
        result = self._executor._answer(self, self._output)
        if self._masks is None:
            return result
        guided = {
            request_id: _nearest_allowed(result.sampled[request_id], bits)
            for request_id, bits in zip(self._masks.request_ids, self._masks.bits, strict=True)
        }
        return ModelRunnerOutput({**result.sampled, **guided}, result.prompt_logprobs)


def _nearest_allowed(wanted: SampledTokens, bits: NDArray[np.uint32]) -> SampledTokens:
    """The token itself if allowed, otherwise the next allowed one, wrapping around at the end of the vocabulary."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    if not len(allowed):
        return SampledTokens((), error="no token is left to choose from")
    return SampledTokens((int(allowed[np.searchsorted(allowed, wanted.token_ids[0]) % len(allowed)]),))
