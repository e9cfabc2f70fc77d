"""The measured numbers of the core: what they stand for, and the benchmark that shows what they do.

`benchmarks/tuning.py` doubles and halves each of them and prints what becomes of the rows; docs/results/tuning.md has
the table. A number without any effect on a row is not here, but a constant of the class that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimeTuning:
    """How large a step may be (`headway.core.step_time`). Rows: `headway bench throughput --scenario online` at 2.5 and
    4.4 times the arrivals of azure_conv, and `benchmarks/itl_target.py`."""

    free_tokens: int = 64
    """The fewest prompt tokens that a step may have, so that prompts always make progress. A step with fewer of them
    counts as one without any."""
    backlog_share: float = 0.1
    """Part of the time that the backlog of prompts needs, which one step may take."""
    backlog_steps: int = 8
    """A backlog of more steps than this at the target's pace justifies a late step."""
    gaining_steps: float = 8.0
    """A step with prompts gains throughput up to this many times the time of its decodes alone: prompts then have 7/8
    of it. Longer ones gain little, and all requests that generate wait for them."""
    stretch: float = 2.5
    """How many times the target a step may take for the sake of a backlog."""
    tokens_per_late_one: int = 250
    """Tokens that have to be in time before another one may be late: the 99th percentile keeps the target."""
    short_part: float = 0.25
    """A prompt up to this part of the largest step is not a long one: several of them are computed together at full
    speed."""
    tile_tokens: int = 128
    """Rows of a matrix product that are computed together, where there are many; smaller products have smaller
    tiles."""
    most_times_expected: float = 3.0
    """A step slower than this is cut off, one faster than its inverse replaces what was learned."""


@dataclass(frozen=True, slots=True)
class SpeculationTuning:
    """Which drafts are verified (`headway.core.speculation`). Rows: `benchmarks/speculation.py`, and the claim
    `speculation` of `headway claims`."""

    least_gain: float = 0.03
    """Drafts have to make a step better by this part of it: what they cost and bring is not known exactly, and requests
    that are lucky leave the others with smaller batches."""
    steps_to_trust: int = 3
    """A time is believed when this number of steps have taken it: one without drafts, and then what drafts add."""
    steps_per_plain_one: int = 128
    """Steps with drafts, one after the other, before one without shows what they are to be compared with."""
    steps_per_fade: int = 3072
    """After this number of steps, half of what drafts have cost and brought is forgotten."""
    first_drafts: int = 4
    """Tokens that the first step with drafts may have, or one for every four requests if that is more."""
    lookups_per_step: int = 4
    """Where steps overlap: for how many requests guesses are looked up for a step, in the mean, while none pays."""
    max_counted: float = 200.0
    """Guesses that are remembered of a kind and place."""


STEP_TIME = StepTimeTuning()
SPECULATION = SpeculationTuning()
