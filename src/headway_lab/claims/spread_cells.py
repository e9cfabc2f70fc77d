"""Cells: work with a wanted spread of answer lengths, served in sealed batches or continuously.

Lengths are lognormal, cut at the longest answer, with the median that gives the wanted mean. What a sealed batch takes
is decided by its longest answer, and a few drawn batches would say little of that. So the longest answers of batches
are evenly placed quantiles of what the longest of so many can be, and the others of a batch are evenly placed below
its longest. A seed decides the order of the batches, and that within each.

Throughput is that of a server on which requests always wait. Continuous batching is measured until as many requests are
left as a batch holds: after that its batch only empties, and how long this takes says more about the length of the run
than about batching. Each sealed batch empties at its end, so they are measured to the end of the last one.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway_lab.claims.published_workloads import with_options
from headway_lab.claims.run import Run
from headway_lab.claims.testbed import Testbed
from headway_lab.workload.bench_requests import BenchRequest

if TYPE_CHECKING:
    from headway.progress import Meter

STATIC, DYNAMIC, CONTINUOUS = "static", "dynamic, by true length", "continuous"
MODES: dict[str, dict[str, Any]] = {
    STATIC: {"batching": "static", "prefill_mode": "prefill-first"},
    DYNAMIC: {"batching": "dynamic", "prefill_mode": "prefill-first"},
    CONTINUOUS: {},
}


@dataclass(frozen=True)
class Cell:
    """The work of a cell, and the limit of the batch."""

    spread: float
    """P99 of the answers' lengths over their median."""
    batch: int
    """The most requests in a batch."""
    prompt_share: float
    """The share of prompts in all tokens. Prompts are equally long."""
    mean: int
    longest: int
    """Mean and most tokens of an answer."""
    load: float = math.inf
    """Arrivals as a share of what static batches serve; infinite: all requests are there at once."""

    @property
    def num_prompt_tokens(self) -> int:
        return max(1, round(self.mean * self.prompt_share / (1 - self.prompt_share)))

    @property
    def crowd(self) -> Cell:
        """The same work all at once."""
        return replace(self, load=math.inf)

    def lengths(self, num_batches: int, seed: int) -> list[int]:
        """The lengths of the answers of so many full batches."""
        rng, normal = random.Random(f"{seed}/lengths"), statistics.NormalDist()
        sigma = math.log(self.spread) / normal.inv_cdf(0.99)
        batches = [_places((number + 0.5) / num_batches, self.batch) for number in range(num_batches)]
        for batch in batches:
            rng.shuffle(batch)
        rng.shuffle(batches)
        factors = [math.exp(sigma * normal.inv_cdf(place)) for batch in batches for place in batch]
        low, high = 1e-6, float(self.longest)
        for _ in range(50):
            median = math.sqrt(low * high)
            is_short = statistics.fmean(self._length(median * factor) for factor in factors) < self.mean
            low, high = (median, high) if is_short else (low, median)
        return [round(self._length(high * factor)) for factor in factors]

    def requests(self, num_batches: int, *, rate: float, seed: int) -> list[BenchRequest]:
        """Requests that arrive at this rate, as a Poisson process; with an infinite one all at once."""
        rng = random.Random(f"{seed}/arrivals")
        prompt = list(range(1, 1 + self.num_prompt_tokens))
        arrival_s, work = 0.0, []
        for length in self.lengths(num_batches, seed):
            arrival_s += rng.expovariate(1.0) / rate
            work.append(BenchRequest(prompt, length, arrival_s=arrival_s))
        return work

    def _length(self, value: float) -> float:
        return min(max(1.0, value), float(self.longest))


def _places(longest: float, count: int) -> list[float]:
    """The quantiles of `count` lengths: the longest of them is at this quantile of what the longest can be."""
    top = longest ** (1 / count)
    return [top, *(top * (number + 0.5) / (count - 1) for number in range(count - 1))]


@dataclass(frozen=True)
class Served:
    """How one mode served the work of a cell."""

    run: Run
    num_left: int
    """The requests that are left when the measurement of the throughput ends."""

    @property
    def tok_s(self) -> float:
        """Prompt and output tokens per second."""
        lines = self.run.timelines
        until_s = sorted(line.token_times_s[-1] for line in lines)[-self.num_left - 1]
        num_tokens = 0
        for line in lines:
            if line.token_times_s[0] <= until_s:
                num_tokens += line.num_prompt_tokens + sum(at_s <= until_s for at_s in line.token_times_s)
        return num_tokens / until_s

    @property
    def mean_s(self) -> float:
        """The mean time from arrival to the last token."""
        return statistics.fmean(line.e2e_s for line in self.run.timelines)


@dataclass(frozen=True)
class Sizes:
    """How many full batches of requests a cell has: so many, or more, until there are so many requests."""

    batches: int
    least: int
    arrivals: int
    """The least requests of a cell with a load."""

    def num_batches(self, cell: Cell) -> int:
        least = self.least if math.isinf(cell.load) else self.arrivals
        return max(self.batches, -(-least // cell.batch))

    def count(self, cell: Cell) -> int:
        """The requests of a cell."""
        return cell.batch * self.num_batches(cell)


Job = tuple[str, Cell, int]
"""A mode, a cell, and the seed of the order of its lengths."""


class Cells:
    """Serves the work of cells on a testbed, each once."""

    def __init__(self, testbed: Testbed, sizes: Sizes, progress: Meter | None = None) -> None:
        self._testbed, self._sizes, self._progress = testbed, sizes, progress
        self._served: dict[Job, Served] = {}

    def served(self, mode: str, cell: Cell, *, seed: int = 0) -> Served:
        key = (mode, cell, seed)
        if key not in self._served:
            self._served[key] = self.serve(mode, cell, seed=seed)
        return self._served[key]

    def serve(self, mode: str, cell: Cell, *, seed: int = 0) -> Served:
        """As `served`, but anew each time, since a machine is never twice as fast."""
        rate = math.inf if math.isinf(cell.load) else cell.load * self._static_rate(cell)
        work = cell.requests(self._sizes.num_batches(cell), rate=rate, seed=seed)
        if mode == DYNAMIC:
            work = with_options(work, [{"predicted_tokens": float(one.num_output_tokens)} for one in work])
        run = self._testbed.run(work, progress=self._progress, max_num_seqs=cell.batch, **MODES[mode])
        return Served(run, cell.batch if mode == CONTINUOUS else 0)

    def throughput_gain(self, cell: Cell, base: str = STATIC, *, seed: int = 0) -> float:
        """Throughput of continuous batching over that of the base."""
        return self.served(CONTINUOUS, cell, seed=seed).tok_s / self.served(base, cell, seed=seed).tok_s

    def latency_gain(self, cell: Cell) -> float:
        """The mean time to the last token with static batches over that with continuous batching."""
        return self.served(STATIC, cell).mean_s / self.served(CONTINUOUS, cell).mean_s

    def _static_rate(self, cell: Cell) -> float:
        """The requests per second that static batches serve."""
        crowd = cell.crowd
        return self.served(STATIC, crowd).tok_s / (crowd.num_prompt_tokens + crowd.mean)


def jobs_of(cell: Cell, base: str = STATIC, *, seed: int = 0) -> list[Job]:
    """What has to be served for the gain of a cell."""
    jobs = [(base, cell, seed), (CONTINUOUS, cell, seed)]
    return jobs if math.isinf(cell.load) else [(STATIC, cell.crowd, seed), *jobs]
