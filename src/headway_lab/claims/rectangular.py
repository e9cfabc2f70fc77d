"""Rectangular batches, as frameworks compute them, made from work that Headway serves without any padding.

    sealed, no padding             rectangular
    in ▇▇▇▇▇   out ▇▇▇▇▇▇▇▇        in ▇▇▇▇▇   out ▇▇▇▇▇▇▇▇
    in ▇▇      out ▇▇              in ░░░▇▇   out ▇▇░░░░░░        ░ computed, and of use to no request
    in ▇▇▇     out ▇▇▇▇▇           in ░░▇▇▇   out ▇▇▇▇▇░░░

Each batch becomes requests of equal size: a prompt gets filler tokens before it, up to the longest prompt of its batch,
and an answer goes on to the end of the longest one. The engine and the simulator serve these requests like any others,
in sealed batches, so all of their rows are really computed, or charged by the cost model. Only the tokens that were
asked for are counted.

A *row* is a token of a request that a step computes: a request with a prompt of p tokens and an answer of n has
p + n − 1, since its last token is sampled and never computed. A *slot* is a place in the batch. It is busy in a step
that gives its request a token that was asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from headway_lab.claims.run import Run
from headway_lab.workload.bench_requests import BenchRequest, Work

_T = TypeVar("_T")


def batches_of(items: list[_T], size: int) -> Iterator[list[_T]]:
    """The items in their order, `size` at a time; the last batch may be smaller."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def rectangular(work: Work, size: int) -> list[BenchRequest]:
    """The requests, padded to the longest prompt and the longest answer of their batch of `size`."""
    return list(itertools.chain.from_iterable(_padded(batch) for batch in batches_of(list(work), size)))


def _padded(batch: list[BenchRequest]) -> list[BenchRequest]:
    num_in = max(one.num_prompt_tokens for one in batch)
    num_out = max(one.num_output_tokens for one in batch)
    return [
        dataclasses.replace(
            one,
            prompt_token_ids=[0] * (num_in - one.num_prompt_tokens) + list(one.prompt_token_ids),
            num_output_tokens=num_out,
        )
        for one in batch
    ]


@dataclass(frozen=True)
class Usage:
    """What became of the rows and slots of a run."""

    num_useful_rows: int
    num_filler_rows: int
    """Rows of filler tokens before prompts."""
    num_late_rows: int
    """Rows of answers behind the last token that was asked for."""
    num_tokens: int
    """Answer tokens that were asked for."""
    num_steps: int
    """Steps that gave a token to at least one request."""
    num_slots: int
    duration_s: float

    @staticmethod
    def of(run: Run, work: Work, num_slots: int) -> Usage:
        """`work` is what was asked for; the run may have served it padded. It needs memory for a whole batch: with
        preemptions, rows are computed again, which are not counted here, so the run is refused."""
        if any(line.num_preemptions for line in run.timelines):
            raise RuntimeError("requests were preempted, so more rows were computed than are counted")
        num_computed = sum(line.num_prompt_tokens + line.num_output_tokens - 1 for line in run.timelines)
        num_filler = sum(line.num_prompt_tokens for line in run.timelines) - sum(one.num_prompt_tokens for one in work)
        num_useful = sum(one.num_prompt_tokens + one.num_output_tokens - 1 for one in work)
        return Usage(
            num_useful_rows=num_useful,
            num_filler_rows=num_filler,
            num_late_rows=num_computed - num_useful - num_filler,
            num_tokens=sum(one.num_output_tokens for one in work),
            num_steps=len({at_s for line in run.timelines for at_s in line.token_times_s}),
            num_slots=num_slots,
            duration_s=run.duration_s,
        )

    @property
    def num_rows(self) -> int:
        """All rows that were computed."""
        return self.num_useful_rows + self.num_filler_rows + self.num_late_rows

    @property
    def waste(self) -> float:
        """The share of the computed rows that is padding, of prompts and of answers."""
        return 1.0 - self.num_useful_rows / self.num_rows

    @property
    def busy(self) -> float:
        """The share of slots that give a token that was asked for, mean over steps."""
        return self.num_tokens / (self.num_slots * self.num_steps)

    @property
    def num_idle(self) -> int:
        """Slots of all steps together that gave nothing."""
        return self.num_slots * self.num_steps - self.num_tokens

    @property
    def tok_s(self) -> float:
        """Answer tokens that were asked for, per second."""
        return self.num_tokens / self.duration_s
