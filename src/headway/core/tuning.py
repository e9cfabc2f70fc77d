"""The tuned numbers of the core, with their meaning and the benchmarks that show their effect.

`benchmarks/tuning.py` doubles and halves each of them and prints the effect on the rows; docs/results/tuning.md has the
table. A number without any effect on a row is a constant of the class that uses it instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimeTuning:
    """How large a step may be (`headway.core.step_time`). Rows: `headway bench throughput --scenario online` at 2.5 and
    4.4 times the arrivals of azure_conv, and `benchmarks/itl_target.py`."""

    free_tokens: int = 64
    """The fewest prompt tokens that a step may have, so that prompts always make progress. A step with fewer of them
    counts as one without prompts."""
    backlog_share: float = 0.1
    """One step may take this part of the time that the whole backlog of prompts needs."""
    backlog_steps: int = 8
    """A backlog that takes more steps than this at the target's pace justifies a late step."""
    gaining_steps: float = 8.0
    """A step with prompts gains throughput up to this many times the time of its decodes alone; prompts then take 7/8
    of it. Longer steps gain little, and all decoding requests wait for them."""
    stretch: float = 2.5
    """For the sake of a backlog, a step may take up to this many times the target."""
    tokens_per_late_one: int = 250
    """How many tokens must be in time before another one may be late, so that the 99th percentile keeps the target."""
    short_part: float = 0.25
    """A prompt up to this part of the largest step is not long: several such prompts are computed together at full
    speed."""
    tile_tokens: int = 128
    """How many rows of a large matrix product are computed together; smaller products have smaller tiles."""
    most_times_expected: float = 3.0
    """A step's time counts up to this many times the expected time. A step that is faster than expected by this factor
    replaces what was learned."""


@dataclass(frozen=True, slots=True)
class SpeculationTuning:
    """Which drafts are verified (`headway.core.speculation`). Rows: `benchmarks/speculation.py`, and the claim
    `speculation` of `headway claims`."""

    least_gain: float = 0.03
    """Drafts must improve a step's token rate by this fraction: their cost and gain are not known exactly, and requests
    that finish early leave smaller batches to the others."""
    steps_to_trust: int = 3
    """How many steps must be measured before a time is trusted: that of plain steps, and that which drafts add."""
    steps_per_plain_one: int = 128
    """After this many steps with drafts in a row, one without drafts is measured for comparison."""
    steps_per_fade: int = 3072
    """After this many steps, the measured costs and counted successes of drafts are halved."""
    first_drafts: int = 4
    """How many draft tokens the first step with drafts may have, or one for every four requests if that is more."""
    lookups_per_step: int = 4
    """If steps overlap: for how many requests guesses are looked up per step, on average, while no draft pays."""
    max_counted: float = 200.0
    """How many guesses of a kind and place are counted before the counts are halved."""


STEP_TIME = StepTimeTuning()
SPECULATION = SpeculationTuning()
