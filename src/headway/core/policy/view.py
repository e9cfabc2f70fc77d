"""What policies may look at beside the requests themselves."""

from __future__ import annotations

from collections.abc import Callable

from headway.core.decode_pace import DecodePace
from headway.core.kv_cache_manager import KVCacheManager
from headway.core.request import Request

_FIRST_STEP_S = 0.02
_MEMORY = 0.05  # of the mean time of a step, what the last one counts


class PolicyView:
    """Kept up to date by the scheduler."""

    def __init__(
        self, kv_cache: KVCacheManager, pace: DecodePace, can_enter: Callable[[Request], bool], *, max_head_skips: int
    ) -> None:
        self._kv_cache = kv_cache
        self.pace = pace
        """What is known about the times of steps."""
        self.can_enter = can_enter
        """Whether a waiting request would find a seat and memory now."""
        self.max_head_skips = max_head_skips
        """How often a request may be passed for want of room."""
        self.now_s = 0.0
        """When the step is planned."""
        self.step_s = _FIRST_STEP_S
        """About how long a step takes, from those that have run."""

    def observe_step(self, duration_s: float) -> None:
        """A step has taken so long."""
        self.step_s += _MEMORY * (duration_s - self.step_s)

    def num_cached_tokens(self, request: Request) -> int:
        """How many tokens of a waiting request are in the prefix cache now."""
        return self._kv_cache.num_cached_tokens(request)

    def num_tokens_to_bring_back(self, request: Request) -> int:
        """How many tokens of a running request would have to be computed again if it gave way: those in blocks that it
        does not share with others."""
        return self._kv_cache.num_own_tokens(request)


def predicted_tokens(request: Request) -> float:
    """How many tokens a request is going to generate in all; if nobody has an idea, as many as it may."""
    if request.options.predicted_tokens is None:
        return float(request.max_total_tokens - request.num_prompt_tokens)
    return request.options.predicted_tokens


def predicted_rest(request: Request) -> float:
    """How many are left; at least one, however wrong the prediction was. Tokens on their way count as generated, so
    that nothing changes when they come while a request waits. Asked of every running request, so it must be quick."""
    predicted = request.options.predicted_tokens
    num_prompt_tokens = request.num_prompt_tokens
    if predicted is None:
        predicted = float(request.max_total_tokens - num_prompt_tokens)
    rest = predicted - (request.num_tokens - num_prompt_tokens)
    return rest if rest > 1.0 else 1.0
