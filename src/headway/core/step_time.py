"""How long steps take, learned from those that have run: how many prompt tokens fit beside the decodes of a step.

A step reads all weights once, whatever it computes, and that takes its `base` time; a few prompt tokens come along for
nothing, every further one costs `per_token`:

    duration                    ╱
                             ╱         target ── the inter-token time that decodes should keep
    base      ───────────╱
              0         64      chunk tokens

`base` is learned from steps with at most a few prompt tokens, `per_token` from the others, and where one of them has
not been seen yet the other tells: a device computes about as many tokens as `TOKENS_PER_BASE` in the time it needs to
read the weights. A step can be slow for many reasons that say nothing about the next one (a kernel is compiled, another
process gets the core), but it is never faster than it can be. So slow ones count up to a limit, and one that is much
faster than expected replaces all that was believed.

No clock in here: durations are told, so the same durations give the same answers.
"""

from __future__ import annotations

FREE_TOKENS = 64
"""The least that `chunk_tokens` answers, so that prompts always make progress; also what counts as next to nothing."""
TOKENS_PER_BASE = 200
"""For an 8B model in 16 bit on a current GPU about 230; off by some factor on other devices, and soon forgotten."""
DEFAULT_TOKENS = 512
"""The answer before anything is known."""

_BASE_WEIGHT = 0.1  # of the newest step in the base time
_HORIZON_TOKENS = 1024  # how many chunk tokens back the cost per token looks: it grows along a prompt
_MOST_TIMES_EXPECTED = 3.0  # beyond this a slow step is cut off, below its inverse a fast one starts anew


class StepTimeModel:
    """Two numbers, kept up to date: the time of a step without prompts, and the extra time per prompt token."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._base_s: float | None = None
        # Weighted sums over steps with chunks, younger ones count more: steps, their tokens, their durations.
        self._num_steps = self._num_tokens = self._duration_s = 0.0

    @property
    def base_s(self) -> float | None:
        """Time of a step that only decodes, or `None` before any step was seen."""
        if self._base_s is not None:
            return self._base_s
        return TOKENS_PER_BASE * self._ratio() if self._num_steps else None

    @property
    def per_token_s(self) -> float | None:
        """Extra time for each prompt token, or `None` before any step was seen."""
        if not self._num_steps:
            return None if self._base_s is None else self._base_s / TOKENS_PER_BASE
        if self._base_s is None:
            return self._ratio()
        return max(0.0, (self._duration_s - self._num_steps * self._base_s) / self._num_tokens)

    def observe(self, num_chunk_tokens: int, duration_s: float) -> None:
        """A step with so many prompt tokens beside its decodes has taken so long."""
        if num_chunk_tokens < FREE_TOKENS:
            self._observe_base(duration_s)
        else:
            self._observe_chunk(num_chunk_tokens, duration_s)

    def chunk_tokens(self, target_s: float) -> int:
        """How many prompt tokens a step with decodes may have to take no longer than `target_s`.

        Never fewer than `FREE_TOKENS`, never more than `max_tokens`.
        """
        base_s, per_token_s = self.base_s, self.per_token_s
        if base_s is None or per_token_s is None:
            return min(DEFAULT_TOKENS, self._max_tokens)
        room_s = max(0.0, target_s - base_s)
        if room_s > per_token_s * self._max_tokens:
            return self._max_tokens
        num_tokens = int(room_s / per_token_s) if per_token_s else 0
        return max(min(FREE_TOKENS, self._max_tokens), num_tokens)

    def _observe_base(self, duration_s: float) -> None:
        if self._base_s is None or duration_s < self._base_s / _MOST_TIMES_EXPECTED:
            self._base_s = duration_s
        else:
            counted_s = min(duration_s, self._base_s * _MOST_TIMES_EXPECTED)
            self._base_s += _BASE_WEIGHT * (counted_s - self._base_s)

    def _observe_chunk(self, num_tokens: int, duration_s: float) -> None:
        base_s, per_token_s = self.base_s, self.per_token_s
        if base_s is not None and per_token_s is not None:
            expected_s = base_s + per_token_s * num_tokens
            if duration_s < expected_s / _MOST_TIMES_EXPECTED:
                self._num_steps = self._num_tokens = self._duration_s = 0.0
            duration_s = min(duration_s, expected_s * _MOST_TIMES_EXPECTED)
        kept = _HORIZON_TOKENS / (_HORIZON_TOKENS + num_tokens)
        self._num_steps = kept * self._num_steps + 1
        self._num_tokens = kept * self._num_tokens + num_tokens
        self._duration_s = kept * self._duration_s + duration_s

    def _ratio(self) -> float:
        """Time per token if reading the weights counts as `TOKENS_PER_BASE` tokens."""
        return self._duration_s / (self._num_tokens + TOKENS_PER_BASE * self._num_steps)
