"""How much of a step prompts may take while other requests generate, so that these keep the inter-token time they want.

Nearly always it is what fits into the target. But when prompts pile up faster than such steps can take them in, keeping
the pace of the few that generate is paid for by the many that wait, and by the device, which reads its weights for
every small piece. So a step may also take a fixed share of the time that the whole backlog needs: in quiet times that
is less than the target and changes nothing, in a flood it lets the steps grow, and as the backlog melts they shrink
back.

    backlog   ▁▁▂▁▁▁▁▁▇▆▄▃▂▁▁▁▁          prompt tokens that are not computed yet
    step      ▂▂▂▂▂▂▂▂▅▄▃▂▂▂▂▂▂          max(target, share × backlog)
"""

from __future__ import annotations

from headway.core.step_time import StepTimeModel

BACKLOG_SHARE = 0.1
"""Of the time that the backlog needs, what one step may take."""


class DecodePace:
    """Answers one question per step: how many prompt tokens beside the decodes. A target of 0 is none."""

    def __init__(self, *, target_s: float, max_tokens: int) -> None:
        self.target_s = target_s
        self.step_time = StepTimeModel(max_tokens=max_tokens)
        self._max_tokens = max_tokens

    def chunk_tokens(self, *, num_decodes: int, num_backlog_tokens: int) -> int:
        """How many prompt tokens the next step may have beside its decodes."""
        if not self.target_s or not num_decodes:
            return self._max_tokens
        backlog_s = num_backlog_tokens * (self.step_time.per_token_s or 0.0)
        return self.step_time.chunk_tokens(max(self.target_s, BACKLOG_SHARE * backlog_s))

    def observe(self, *, num_chunk_tokens: int, duration_s: float) -> None:
        """A step with so many prompt tokens beside its decodes has taken so long."""
        if self.target_s:
            self.step_time.observe(num_chunk_tokens, duration_s)
