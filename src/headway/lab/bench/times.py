"""Records of time: of a whole round, and of the tokens of one request, with the rates and latencies that follow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.lab.workload.requests import Work


@dataclass(frozen=True)
class RoundTimes:
    """The time of a round, and what was done in it."""

    elapsed_s: float
    pace_s: float | None
    """Mean time of an output token after the first, over all requests; `None` if none has a second token."""
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, work: Work, *, elapsed_s: float, pace_s: float | None) -> RoundTimes:
        """The times of this work."""
        return cls(
            elapsed_s=elapsed_s,
            pace_s=pace_s,
            num_requests=len(work),
            num_input_tokens=sum(request.num_prompt_tokens for request in work),
            num_output_tokens=sum(request.num_output_tokens * request.num_choices for request in work),
        )

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def input_tok_s(self) -> float:
        return self.num_input_tokens / self.elapsed_s

    @property
    def total_tok_s(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.elapsed_s

    @property
    def requests_s(self) -> float:
        return self.num_requests / self.elapsed_s

    @property
    def elapsed_per_token_s(self) -> float:
        """The time of the whole round over the tokens of one output, prompts included. For rounds of equal outputs."""
        return self.elapsed_s * self.num_requests / self.num_output_tokens


@dataclass
class RequestTimeline:
    """The life of a request, in seconds after the start of the replay."""

    arrival_s: float
    """When it was due, not when the engine got round to taking it: waiting outside of the engine is waiting too."""
    num_prompt_tokens: int
    num_wanted_tokens: int
    token_times_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; `None` if that was not told."""

    @property
    def num_output_tokens(self) -> int:
        """How many it got."""
        return len(self.token_times_s)

    @property
    def tokens_per_event(self) -> float:
        """How many tokens stand behind each of its times."""
        return self.num_output_tokens / len(self.token_times_s) if self.token_times_s else 1.0

    @property
    def is_complete(self) -> bool:
        """Whether it got exactly its tokens."""
        return len(self.token_times_s) == self.num_wanted_tokens

    @property
    def end_s(self) -> float | None:
        """When it had its last token; `None` if it had none."""
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def ttft_s(self) -> float:
        """Time to first token, from arrival."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: the gaps between its tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: the mean gap; `None` with a single token."""
        gaps = self.num_output_tokens - 1
        return (self._last_s - self.token_times_s[0]) / gaps if gaps > 0 else None

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self._last_s - self.arrival_s

    @property
    def _last_s(self) -> float:
        assert self.end_s is not None
        return self.end_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; `nan` without values."""
    return percentiles(values, [percent])[0]


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[float]:
    """Several of them, for the price of one sort."""
    ordered = sorted(values)
    return [_between_ranks(ordered, percent) for percent in percents]


def _between_ranks(ordered: Sequence[float], percent: float) -> float:
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
