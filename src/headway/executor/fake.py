"""An executor without a model: tokens come from a function. For tests and for measuring everything but the model."""

from __future__ import annotations

from collections.abc import Callable

from headway.core.scheduler_output import ModelRunnerOutput, SampledTokens, SchedulerOutput

NextToken = Callable[[str, int], int]
"""(request id, number of tokens it has) → the next token."""


class FakeExecutor:
    """Checks that each plan continues where the last one left off, as a real runner would need it to."""

    def __init__(self, next_token: NextToken = lambda request_id, num_tokens: 0) -> None:
        self._next_token = next_token
        self._num_computed: dict[str, int] = {}
        self.num_steps = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Answer at once."""
        self.num_steps += 1
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self._num_computed.pop(request_id, None)
        for new in output.new_requests:
            self._num_computed[new.request_id] = 0
        sampled = {}
        for scheduled in output.scheduled:
            expected = self._num_computed[scheduled.request_id]
            if scheduled.num_computed_tokens != expected:
                raise RuntimeError(
                    f"{scheduled.request_id}: planned from {scheduled.num_computed_tokens}, computed to {expected}"
                )
            num_computed = expected + scheduled.num_tokens
            self._num_computed[scheduled.request_id] = num_computed
            if scheduled.samples:
                sampled[scheduled.request_id] = SampledTokens((self._next_token(scheduled.request_id, num_computed),))
        return ModelRunnerOutput(sampled=sampled, prompt_logprobs={})

    def shutdown(self) -> None:
        """Nothing to free."""
