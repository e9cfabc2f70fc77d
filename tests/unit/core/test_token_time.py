"""The time of steps is divided between prompts and answers: all of it, and by what decodes alone would take."""

from __future__ import annotations

import pytest

from headway.core.scheduler_output import ScheduledRequest, SchedulerOutput
from headway.core.step_time import DecodePace
from headway.core.token_time import TokenTime, TokenTimeStats


def output(*num_tokens: int, drafts: int = 0) -> SchedulerOutput:
    """A step with a share of so many tokens for each request; the last has `drafts` guesses among them."""
    guesses = (1,) * drafts
    shares = [
        ScheduledRequest(str(place), number, 0, (), True, guesses if place == len(num_tokens) - 1 else ())
        for place, number in enumerate(num_tokens)
    ]
    plan = SchedulerOutput.empty(0)
    return SchedulerOutput(
        step_id=0,
        new_requests=(),
        scheduled=tuple(shares),
        preempted_request_ids=(),
        finished_request_ids=(),
        num_scheduled_tokens=sum(num_tokens),
        moves=plan.moves,
    )


def learnt() -> DecodePace:
    """Steps of 10 decodes take 20 ms."""
    pace = DecodePace(target_s=0.0, long_step_s=0.0, max_tokens=1000, full_tokens=0)
    for _ in range(200):
        pace.observe(num_chunk_tokens=0, num_decodes=10, duration_s=0.02)
    return pace


@pytest.mark.parametrize(
    ("step", "prompt_s", "output_s"),
    [
        (output(1, 1, 1), 0.0, 0.05),  # decodes only
        (output(1, 5, drafts=4), 0.0, 0.05),  # with guesses
        (output(300, 200), 0.05, 0.0),  # prompts only
        (output(*[1] * 10, 300), 0.03, 0.02),  # the prompt pays for what it adds
    ],
)
def test_a_step_is_divided(step: SchedulerOutput, prompt_s: float, output_s: float) -> None:
    time = TokenTime(learnt())
    time.take(step, 0.05)
    assert (time.stats.prompt_s, time.stats.output_s) == (pytest.approx(prompt_s), pytest.approx(output_s))


def test_decodes_pay_at_most_the_step() -> None:
    """A step may be faster than decodes alone usually are."""
    time = TokenTime(learnt())
    time.take(output(*[1] * 10, 300), 0.005)
    assert (time.stats.prompt_s, time.stats.output_s) == (pytest.approx(0.0), pytest.approx(0.005))


def test_the_share_of_prompts() -> None:
    assert TokenTimeStats().prompt_share is None
    assert TokenTimeStats(prompt_s=1.0, output_s=3.0).prompt_share == 0.25
