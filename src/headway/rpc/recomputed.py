"""Tokens that are computed a second time, because their request was preempted in between.

computed before it was preempted   ■ ■ ■ ■ ■ ■ ■ ■ ■ ■
found in the cache when it is back ■ ■ ■ ■
computed again                             ▣ ▣ ▣ ▣ ▣ ▣     only these count, and only when they are computed
"""

from __future__ import annotations

from collections.abc import Container

from headway.core import NewRequest, SchedulerOutput


class RecomputedTokens:
    """Follows requests amid their prompts, and those that were preempted until they are where they were."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._amid_prompt: dict[str, int] = {}  # how many tokens are computed
        self._left: dict[str, int] = {}  # of requests that were preempted: how many had been
        self._catching_up: dict[str, int] = {}  # the same, of those that are back

    def has_left(self, request_id: str) -> bool:
        """Whether a request that enters the batch has been in it before."""
        return request_id in self._left

    def take(self, plan: SchedulerOutput, live: Container[str], *, is_decode: bool) -> None:
        """Take in the plan of a step, in the order of the steps. `live`: ids of the requests that have not ended;
        `is_decode`: the step has no chunks of prompts."""
        for request_id in plan.preempted_request_ids:
            before = self._amid_prompt.pop(request_id, 0)
            self._left[request_id] = max(before, self._catching_up.pop(request_id, 0))
        if self._left:
            for new in plan.new_requests:
                self._note_return(new)
            if plan.preempted_request_ids:
                self._left = {request_id: num for request_id, num in self._left.items() if request_id in live}
        if self._catching_up:
            self._count(plan)
        if not is_decode:
            self._note_chunks(plan)
        for request_id in plan.finished_request_ids:
            self._amid_prompt.pop(request_id, None)
            self._catching_up.pop(request_id, None)

    def _note_return(self, new: NewRequest) -> None:
        """Who has generated something had all of its tokens computed but the last."""
        before = self._left.pop(new.request_id, None)
        if before is not None:
            has_output = bool(new.output_token_ids)
            num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
            self._catching_up[new.request_id] = max(before, num_known - 1 if has_output else 0)

    def _count(self, plan: SchedulerOutput) -> None:
        for share in plan.scheduled:
            before = self._catching_up.get(share.request_id)
            if before is not None:
                end = share.num_computed_tokens + share.num_tokens
                self.num_tokens += max(0, min(end, before) - share.num_computed_tokens)
                if end >= before:
                    del self._catching_up[share.request_id]

    def _note_chunks(self, plan: SchedulerOutput) -> None:
        for share in plan.scheduled:
            if share.samples:
                self._amid_prompt.pop(share.request_id, None)
            else:
                self._amid_prompt[share.request_id] = share.num_computed_tokens + share.num_tokens
