"""A prompt of 32,000 tokens that arrives while others generate: how long these stand still, and how long it takes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway_lab.claims.claim import Chart, Outcome, change, milliseconds, percent, sentences, times
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.published_workloads import equal
from headway_lab.claims.run import Run


@dataclass(frozen=True)
class LongPromptSetup:
    """The requests, and what bounds their steps. Lengths are divided where the machine is slow."""

    long_total: int = 32_768
    """The long prompt and its answer."""
    long_out: int = 64
    num_others: int = 16
    others_in: int = 512
    others_out: int = 1_024
    settled: int = 8
    """So many tokens after the last of the others has begun, the long prompt arrives."""
    chunks: tuple[int, ...] = (2_048, 512)
    budget_steps: float = 4.0
    """A step with a chunk may take as long as so many that only decode."""
    max_num_seqs: int = 32
    no_limit_ms: float = 100_000.0


SETUP = LongPromptSetup()
_WHOLE = "whole"
NOTHING = "none arrives"
EXTRAPOLATED = {"8 contexts of 32,000, a decode step": (0.01281, 0.01185), "a prompt of 128,000": (17.72, 11.84)}
"""By how much the shipped calibration of an H200, whose contexts end at 8,192 tokens, is off beyond them: what it says
and what was measured, in seconds (long_context.py, d6aa882 and 5b7f1b1)."""


@dataclass(frozen=True)
class Stall:
    """One way to compute the long prompt."""

    gap_s: float
    """The longest time between two tokens of the others while it is computed."""
    median_s: float
    """The median time between their tokens in that time."""
    ttft_s: float
    """From its arrival to its first token."""
    output_tok_s: float


def measure_long_prompt(context: Context) -> Outcome:
    part = context.divisor
    prompt = (SETUP.long_total - SETUP.long_out) // part
    try:
        context.testbed.use(max_model_len=SETUP.long_total // part)
        stalls, alone = _measure(context, prompt)
    finally:
        context.testbed.use()
    budget = list(stalls)[-1]
    whole, bounded = stalls[_WHOLE], stalls[budget]
    return Outcome(
        value=1e3 * whole.gap_s,
        unit="ms standing still",
        ours=f"whole: the others stand still for {milliseconds(whole.gap_s)}, its first token comes after "
        f"{milliseconds(whole.ttft_s)}; {budget}: {milliseconds(bounded.gap_s)} and {milliseconds(bounded.ttft_s)}",
        workload=f"{SETUP.num_others} requests of {SETUP.others_in // part} tokens in and {SETUP.others_out // part} "
        f"out generate when a prompt of {prompt:,} tokens arrives{context.divided}",
        differs=_differs(context, stalls, alone, budget),
        where=context.where,
        chart=Chart(
            f"A prompt of {prompt:,} tokens beside {SETUP.num_others} requests that generate",
            "milliseconds, log: the longest gap of the others, and the long prompt's first token",
            bars={
                **{f"{mode}: others wait": 1e3 * stall.gap_s for mode, stall in stalls.items()},
                **{f"{mode}: first token": 1e3 * stall.ttft_s for mode, stall in stalls.items()},
            },
            log_y=True,
        ),
        numbers={
            mode: {
                "longest gap of the others, ms": 1e3 * stall.gap_s,
                "median gap meanwhile, ms": 1e3 * stall.median_s,
                "output tokens/s": stall.output_tok_s,
                **({"TTFT of the long prompt, ms": 1e3 * stall.ttft_s} if mode != NOTHING else {}),
            }
            for mode, stall in {NOTHING: alone, **stalls}.items()
        },
    )


def _measure(context: Context, prompt: int) -> tuple[dict[str, Stall], Stall]:
    """Each way to compute the prompt, the one with a budget of time last; and the others without it."""
    part = context.divisor
    others = equal(
        context, SETUP.num_others, num_in=SETUP.others_in // part, num_out=SETUP.others_out // part
    ).at_once()
    room = {"max_model_len": SETUP.long_total // part, "max_num_seqs": SETUP.max_num_seqs}
    alone = context.run("the others alone", others, **room)
    gaps = [gap for line in alone.timelines for gap in line.itls_s]
    step_s = statistics.median(gaps)
    arrival_s = max(line.token_times_s[0] for line in alone.timelines) + SETUP.settled * step_s
    long = equal(context, 1, num_in=prompt, num_out=max(1, SETUP.long_out // part)).at_once()[0]
    work = [*others, dataclasses.replace(long, arrival_s=arrival_s)]
    stalls = {
        mode: _stall(context.run(f"{prompt:,} tokens, {mode}", work, **room, **options))
        for mode, options in _modes(part, 1e3 * SETUP.budget_steps * step_s).items()
    }
    return stalls, Stall(max(gaps), step_s, 0.0, alone.output_tok_s)


def _modes(part: int, budget_ms: float) -> Mapping[str, dict[str, Any]]:
    unlimited = {"target_itl_ms": SETUP.no_limit_ms, "long_prompt_step_ms": 0.0}
    return {
        _WHOLE: {"prefill_mode": "prefill-first"},
        **{
            f"chunks of {size // part:,}": {**unlimited, "max_num_batched_tokens": size // part}
            for size in SETUP.chunks
        },
        f"steps of {budget_ms:.0f} ms": {"target_itl_ms": budget_ms, "long_prompt_step_ms": 2 * budget_ms},
    }


def _stall(run: Run) -> Stall:
    """What the others feel from the arrival of the long prompt to its first token."""
    *others, long = run.timelines
    begin_s, end_s = long.arrival_s, long.token_times_s[0]
    gaps = [
        later - earlier
        for line in others
        for earlier, later in zip(line.token_times_s, line.token_times_s[1:])
        if later > begin_s and earlier < end_s
    ]
    return Stall(max(gaps), statistics.median(gaps), long.ttft_s, run.output_tok_s)


def _differs(context: Context, stalls: Mapping[str, Stall], alone: Stall, budget: str) -> str:
    whole, bounded = stalls[_WHOLE], stalls[budget]
    place = "within" if 0.2 <= whole.gap_s <= 0.4 else "outside"
    later = percent(change(bounded.ttft_s, whole.ttft_s), signed=True)
    chunks = [f"{mode} {milliseconds(stall.gap_s)}" for mode, stall in stalls.items() if mode not in (_WHOLE, budget)]
    return sentences(
        [
            f"{milliseconds(whole.gap_s)} is {place} the published range, which names neither model nor machine: a "
            "prompt's time grows with the parameters and, by attention, with the square of its length.",
            f"The longest gap of the others is {times(whole.gap_s / bounded.gap_s)} shorter with {budget}, and the "
            f"time to the first token of the long prompt changes by {later}; "
            f"without the prompt the longest gap is {milliseconds(alone.gap_s)}.",
            f"A fixed number of tokens takes longer the more of the prompt is behind it ({', '.join(chunks)}); a "
            "budget of time makes chunks smaller instead. It is kept by most steps, not by all: on a GPU a step with a "
            "long prompt has 1,024 tokens at least, as fewer leave most of the device idle.",
            _beyond(context),
        ]
    )


def _beyond(context: Context) -> str:
    if context.where != "simulator":
        return ""
    found = ", ".join(
        f"{what} {simulated / measured:.2f}× the time measured" for what, (simulated, measured) in EXTRAPOLATED.items()
    )
    return sentences(
        [
            "Beyond its contexts a calibration is continued as a straight line.",
            f"That of the H200, of up to 8,192 tokens, is too dear there: {found}.",
        ]
    )


LONG_PROMPT = Claim(
    id="long-prompt",
    title="A prompt of 32,000 tokens",
    published="A prompt of 32k tokens takes 200–400 ms to its first token, and while it is computed all others wait.",
    source="Guides to chunked prefill, without a single origin",
    workload="one prompt of 32k tokens among requests that generate",
    method="The same arrivals with the prompt whole, in chunks of fixed size, and in steps of bounded time.",
    measure=measure_long_prompt,
    engine="gpu",
)
