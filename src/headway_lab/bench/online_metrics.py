"""The numbers of a run in which requests arrive over time: latencies by percentile, rates, goodput; bounds on them.

One form for every run: on the engine in this process, on a server, or in the simulator. An objective bounds one key of
the result, such as `p99_itl_ms=100`: a latency, or a count of failures, must not exceed its bound; a rate or a share
must reach it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.console.flags import parse_number
from headway.errors import ConfigError, did_you_mean
from headway_lab.bench.slo_targets import Targets, attainment
from headway_lab.bench.timelines import (
    RequestTimeline,
    in_flight,
    offered_rate,
    percentiles,
    token_rate,
)

if TYPE_CHECKING:
    from headway_lab.bench.pricing import Pricing, RunPrices


SHOWN_PERCENTILES = (50, 90, 95, 99)
THIN_MARK = "*"

HIGHER_IS_BETTER = frozenset(
    {
        "completed",
        "request_throughput",
        "request_goodput",
        "goodput_share",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
    }
)
NEITHER_IS_BETTER = frozenset(
    {
        "duration",
        "total_input_tokens",
        "total_output_tokens",
        "offered_request_rate",
        "max_concurrent_requests",
        "tokens_per_event",
        "total_cached_tokens",
        "cached_token_share",
        "price_per_hour",
        "price_devices",
        "prompt_time_share",
    }
)
SARATHI = ("p99_itl_ms=100", "p50_ttft_ms=2000")
"""Sarathi-Serve's objectives of capacity: the 99th percentile of the time between tokens is bounded, and so is the
median delay until a request begins (here with the computation of its prompt in it)."""


def is_thin(percent: float, num_requests: int) -> bool:
    """Whether there are too few requests for this percentile, which is then their largest value, or nearly."""
    return percent < 100 and num_requests * (100 - percent) < 100


def thin_note(num_requests: int, percent: float = 99) -> str:
    """The footnote to marked percentiles; "" if there are enough requests."""
    if not is_thin(percent, num_requests):
        return ""
    least = math.ceil(100 / (100 - percent))
    return (
        f"{THIN_MARK} P{percent:g} of {num_requests:,} requests, fewer than {least:,}: one or two of them decide it, "
        "and another run may give another."
    )


@dataclass(frozen=True)
class Distribution:
    """One kind of latency over all requests (or all gaps), in milliseconds."""

    mean: float
    std: float
    percentiles: dict[float, float]
    max: float

    @classmethod
    def of_seconds(cls, values: Sequence[float], percents: Sequence[float] = SHOWN_PERCENTILES) -> Distribution:
        """A distribution of latencies in seconds; all values are `nan` if there are none. `percents` must have 50 and
        99 in it."""
        ms = [1000 * value for value in values]
        return cls(
            mean=statistics.fmean(ms) if ms else math.nan,
            std=_spread(ms),
            percentiles=dict(zip(percents, percentiles(ms, percents), strict=True)),
            max=max(ms, default=math.nan),
        )

    @property
    def p99_over_p50(self) -> float:
        """The ratio of P99 to P50; 1 if all values are equal."""
        median = self.percentiles[50]
        return self.percentiles[99] / median if median else math.nan

    def as_json(self, name: str) -> dict[str, float | None]:
        """The values under the keys that vLLM's serving benchmark uses, and some more of the same form."""
        keys = {"mean": self.mean, "median": self.percentiles[50], "std": self.std}
        keys |= {f"p{percent:g}": value for percent, value in self.percentiles.items()}
        keys["max"] = self.max
        result = {f"{key}_{name}_ms": _or_none(value) for key, value in keys.items()}
        return result | {f"{name}_p99_over_p50": _or_none(self.p99_over_p50)}


@dataclass(frozen=True)
class OnlineMetrics:
    """The results of a run. Lost requests are counted, and left out of the other numbers."""

    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    """Gaps between the times at which tokens arrived. A server may send several tokens at once: see
    `tokens_per_event`."""
    e2el: Distribution
    duration_s: float
    num_completed: int
    num_lost: int
    num_input_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_cached_tokens: int | None
    """Prompt tokens that came from the prefix cache; `None` if no request reports them."""
    tokens_per_event: float
    """Above 1 if several tokens arrive at a time."""
    peak_output_tok_s: float
    """Output tokens in the best second."""
    peak_in_flight: int
    num_good: int | None = None
    """Completed requests that met every target; `None` if there were no targets."""
    offered_s: float | None = None
    """Requests that arrived each second, until the last arrival; `None` if all were there at once."""
    prices: RunPrices | None = None
    """The prices of its tokens; `None` if the price of a device is not known."""

    @classmethod
    def of(
        cls,
        timelines: Sequence[RequestTimeline],
        duration_s: float,
        *,
        targets: Targets | Sequence[Targets] | None = None,
        percents: Sequence[float] = SHOWN_PERCENTILES,
    ) -> OnlineMetrics:
        """The metrics of a run's timelines. With `targets` (of all requests, or of each) they have a goodput.
        `percents` are percentiles besides the usual ones."""
        done = [timeline for timeline in timelines if timeline.is_complete]
        wanted = sorted({*SHOWN_PERCENTILES, *percents})
        num_events = sum(len(timeline.token_times_s) for timeline in done)
        num_output_tokens = sum(timeline.num_output_tokens for timeline in done)
        return cls(
            ttft=Distribution.of_seconds([timeline.ttft_s for timeline in done], wanted),
            tpot=Distribution.of_seconds([t.tpot_s for t in done if t.tpot_s is not None], wanted),
            itl=Distribution.of_seconds([gap for timeline in done for gap in timeline.itls_s], wanted),
            e2el=Distribution.of_seconds([timeline.e2e_s for timeline in done], wanted),
            duration_s=duration_s,
            num_completed=len(done),
            num_lost=len(timelines) - len(done),
            num_input_tokens=sum(timeline.num_prompt_tokens for timeline in done),
            num_output_tokens=num_output_tokens,
            num_preemptions=sum(timeline.num_preemptions for timeline in timelines),
            num_cached_tokens=_sum_of_known([timeline.num_cached_tokens for timeline in done]),
            tokens_per_event=num_output_tokens / num_events if num_events else math.nan,
            peak_output_tok_s=token_rate(done, 1.0).peak,
            peak_in_flight=int(in_flight(timelines).peak),
            num_good=None if targets is None else attainment(timelines, targets).num_met,
            offered_s=offered_rate(timelines),
        )

    def priced(self, pricing: Pricing) -> OnlineMetrics:
        """The same metrics with the prices of the tokens. Lost requests are paid for by the others."""
        tokens = {"num_input_tokens": self.num_input_tokens, "num_output_tokens": self.num_output_tokens}
        return dataclasses.replace(self, prices=pricing.of(self.duration_s, **tokens))

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def total_tok_s(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.duration_s

    @property
    def requests_s(self) -> float:
        return self.num_completed / self.duration_s

    @property
    def good_requests_s(self) -> float | None:
        """Goodput: requests that met every target, each second."""
        return None if self.num_good is None else self.num_good / self.duration_s

    @property
    def good_share(self) -> float | None:
        """The share of all requests that met every target; a lost request met none."""
        num_requests = self.num_completed + self.num_lost
        return None if self.num_good is None or not num_requests else self.num_good / num_requests

    @property
    def cached_share(self) -> float | None:
        """The share of all prompt tokens that came from the prefix cache."""
        known = self.num_cached_tokens is not None and self.num_input_tokens
        return self.num_cached_tokens / self.num_input_tokens if known else None  # type: ignore[operator]

    @property
    def itl_p99_over_p50(self) -> float:
        """How uneven the gaps between tokens are; 1 if all are equal."""
        return self.itl.p99_over_p50

    def percentile_text(self, name: str, percent: float, digits: int = 1) -> str:
        """A percentile of the latency of this short name, in milliseconds, marked if there are too few requests for
        it."""
        value = self.latencies[name].percentiles[percent]
        return f"{value:,.{digits}f}{THIN_MARK if is_thin(percent, self.num_completed) else ''}"

    @property
    def thin_note(self) -> str:
        """The footnote of marked P99s; "" if there are none."""
        return thin_note(self.num_completed)

    @property
    def latencies(self) -> dict[str, Distribution]:
        """The distributions by the short names that the keys use."""
        return {"ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "e2el": self.e2el}

    def as_json(self) -> dict[str, float | None]:
        """vLLM's keys for a serving benchmark, and ours beside them."""
        result: dict[str, float | None] = {
            "duration": self.duration_s,
            "completed": self.num_completed,
            "failed": self.num_lost,
            "total_input_tokens": self.num_input_tokens,
            "total_output_tokens": self.num_output_tokens,
            "offered_request_rate": self.offered_s,
            "request_throughput": self.requests_s,
            "request_goodput": self.good_requests_s,
            "goodput_share": self.good_share,
            "output_throughput": self.output_tok_s,
            "total_token_throughput": self.total_tok_s,
            "max_output_tokens_per_s": self.peak_output_tok_s,
            "max_concurrent_requests": self.peak_in_flight,
            "tokens_per_event": _or_none(self.tokens_per_event),
            "num_preemptions": self.num_preemptions,
            "total_cached_tokens": self.num_cached_tokens,
            "cached_token_share": self.cached_share,
        }
        for name, distribution in self.latencies.items():
            result |= distribution.as_json(name)
        return result if self.prices is None else result | self.prices.as_json()


def _spread(values: Sequence[float]) -> float:
    """The standard deviation, in floating point, since exact fractions of a million gaps take minutes."""
    if not values:
        return math.nan
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))


def _sum_of_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _or_none(value: float) -> float | None:
    """The value, or `None` if it is not finite: JSON has no other way to write that."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Objective:
    """A bound on one key of a result."""

    key: str
    bound: float

    @property
    def is_floor(self) -> bool:
        """Whether the value must reach the bound instead of staying below it."""
        return self.key in HIGHER_IS_BETTER

    def is_met(self, result: Mapping[str, float | None]) -> bool:
        """Whether a result meets the objective. A value equal to the bound does; a missing value does not."""
        value = result.get(self.key)
        if value is None:
            return False
        return value >= self.bound if self.is_floor else value <= self.bound

    def __str__(self) -> str:
        return f"{self.key} {'≥' if self.is_floor else '≤'} {self.bound:g}"


def parse_objective(text: str) -> Objective:
    """Read `KEY=BOUND`. `ConfigError` names the key that was probably meant."""
    key, _, number = text.partition("=")
    known = tuple(key for key in result_keys() if key not in NEITHER_IS_BETTER)
    if key not in known:
        hint = did_you_mean(key, known) or " Keys are those of the result, such as p99_itl_ms or request_goodput."
        raise ConfigError(f"An objective is KEY=BOUND; there is no key '{key}' to bound.{hint}")
    try:
        bound = parse_number(number)
    except ValueError:
        raise ConfigError(f"The bound of '{key}' must be a finite number, not '{number}'.") from None
    if bound < 0 or (bound == 0 and key.endswith("_ms")):
        raise ConfigError(f"The bound of '{key}' must be above 0, not {number}: no request takes no time.")
    if bound > 1 and key.endswith("_share"):
        raise ConfigError(f"The bound of '{key}' is a share of at most 1, not {number}.")
    return Objective(key, bound)


def missed(objectives: Sequence[Objective], result: Mapping[str, float | None]) -> list[Objective]:
    """The objectives that a result does not meet."""
    return [objective for objective in objectives if not objective.is_met(result)]


def result_keys() -> tuple[str, ...]:
    """The keys that every result has."""
    return tuple(OnlineMetrics.of([], 1.0).as_json())
