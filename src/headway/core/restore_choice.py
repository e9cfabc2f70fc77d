"""Whether blocks in host memory are copied back or their tokens computed again: whichever takes less time.

Both times are measured: copying a block when the engine starts, computing a token from the steps that have run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.core.request import Request


@dataclass(frozen=True, slots=True)
class RestoreChoice:
    """`mode` is for requests that were preempted: auto, recompute or swap. For others the times alone decide."""

    mode: str = "auto"
    restore_block_s: float = 0.0
    token_s: Callable[[], float | None] = lambda: None
    """What computing a prompt token takes; `None` while that is not known, when copying is taken to be faster."""

    def should_restore(self, request: Request, *, num_blocks: int, num_tokens: int) -> bool:
        """Whether to copy these blocks in, or to compute these tokens."""
        if request.num_preemptions and self.mode != "auto":
            return self.mode == "swap"
        token_s = self.token_s()
        return token_s is None or num_blocks * self.restore_block_s < num_tokens * token_s
