"""The measured numbers of the core: what they stand for, and the benchmark that shows what they do.

Each could be another on another machine. They are chosen so that little depends on it: a number either is a limit that
is seldom met, or is forgotten once steps have been measured. `benchmarks/tuning.py` doubles and halves each of them and
prints what becomes of the rows; docs/results/tuning.md has its table.
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
    tokens_per_base: int = 200
    """How many prompt tokens are computed in the time in which the weights are read, until that has been measured:
    about 230 for an 8B model in 16 bit on an H200."""
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
    short_tokens: int = 512
    """A prompt up to this length is never a long one, if a step's budget can hold it. Measured step times cannot tell:
    beside a long context each token costs a multiple of what it costs in a short prompt."""
    short_part: float = 0.25
    """Nor is a prompt up to this part of the largest step: several of them are computed together at full speed."""
    tile_tokens: int = 128
    """Rows of a matrix product that are computed together, where there are many; smaller products have smaller
    tiles."""
    rows_per_base: float = 100.0
    """This many requests cost as much as reading the weights, as long as only batches of one size have been observed:
    about right for an 8B model in 16 bit with contexts of a thousand tokens."""
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
