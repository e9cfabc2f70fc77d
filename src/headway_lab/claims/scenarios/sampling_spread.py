"""Temperature and top-p against the spread of answer lengths, and so against the gain of continuous batching."""

from __future__ import annotations

import random
from collections.abc import Sequence

from headway_lab.claims.answer_lengths import Answers, measure_answers, num_answers, recorded
from headway_lab.claims.claim import Chart, Outcome, percent, sentences, times
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.scenarios.padding import SEALING
from headway_lab.claims.testbed import EngineTestbed, SimulatedTestbed, Testbed
from headway_lab.workload.bench_requests import BenchRequest

_SIZE, _NUM_REQUESTS = 16, 240
_TITLE = "Gain by temperature, in the lengths that it gave"


def measure_sampling_spread(context: Context) -> Outcome:
    answers, origin = _answers(context)
    simulated: Testbed = SimulatedTestbed.open() if isinstance(context.testbed, EngineTestbed) else context.testbed
    gains = {str(one.sampling): gain_of(simulated, one) for one in answers}
    by_name = {str(one.sampling): one for one in answers}
    plain = [name for name, one in by_name.items() if one.sampling.top_p == 1]
    widest = max(by_name, key=lambda name: by_name[name].spread)
    spreads = " / ".join(f"{by_name[name].spread:.2f}" for name in plain)
    return Outcome(
        value=gains["T 1"],
        unit="× static at T 1",
        ours=f"spread {spreads} at {' / '.join(plain)}, gain {' / '.join(times(gains[name]) for name in plain)}",
        workload=f"{origin}; {_NUM_REQUESTS} simulated requests of these lengths at once, at most {_SIZE} at a time",
        differs=_differs(by_name, gains, widest),
        where=context.where,
        chart=Chart(
            _TITLE,
            "continuous over static batching, times the throughput",
            bars=gains,
            notes={name: f"spread {one.spread:.2f}, mean {one.mean:.0f} tokens" for name, one in by_name.items()},
        ),
        numbers={
            name: {
                "mean tokens": one.mean,
                "spread (deviation / mean)": one.spread,
                "of answers to one prompt": one.spread_of_a_prompt,
                "cut off, %": 100 * one.share_cut,
                "longest / mean": max(one.flat) / one.mean,
                "gain": gains[name],
            }
            for name, one in by_name.items()
        },
    )


def _answers(context: Context) -> tuple[Sequence[Answers], str]:
    """Answers measured now on an engine, or those of the package; and a text about them."""
    if not isinstance(context.testbed, EngineTestbed):
        found = recorded()
        return found.answers, f"lengths as recorded: {found.origin}"
    num_prompts = context.sized(tiny=10, short=16, full=16)
    num_samples = context.sized(tiny=2, short=4, full=8)
    max_tokens = context.sized(tiny=160, short=512, full=1024)
    num_all = num_answers(num_prompts, num_samples)
    context.say(f"answering: {num_all:,} requests")
    with context.bar(num_all, "answering") as progress:
        answers = measure_answers(
            context.testbed.engine(),
            num_prompts=num_prompts,
            num_samples=num_samples,
            max_tokens=max_tokens,
            progress=progress,
        )
    return answers, f"{num_samples} answers to each of {num_prompts} prompts, cut off at {max_tokens:,} tokens"


def gain_of(simulated: Testbed, answers: Answers) -> float:
    """Throughput of continuous over that of sealed batches, for requests drawn from these answers."""
    sizes = random.Random("answers").choices(answers.sizes, k=_NUM_REQUESTS)
    work = [
        BenchRequest([place % simulated.vocab_size] * num_in, num_out) for place, (num_in, num_out) in enumerate(sizes)
    ]
    static = simulated.run(work, max_num_seqs=_SIZE, **SEALING)
    continuous = simulated.run(work, max_num_seqs=_SIZE)
    return static.duration_s / continuous.duration_s


def _differs(by_name: dict[str, Answers], gains: dict[str, float], widest: str) -> str:
    greedy, hottest = by_name["greedy"], by_name["T 1.3"]
    grows = by_name["T 1"].spread > greedy.spread
    least = min(gains, key=lambda name: gains[name])
    return sentences(
        [
            f"The prompts alone spread the answers: greedily, with one answer to a prompt, by {greedy.spread:.2f} of "
            f"their mean. Sampling lets answers to one prompt differ, by {by_name['T 1'].spread_of_a_prompt:.2f} of "
            f"the mean at temperature 1; over all of them the spread {'grows' if grows else 'does not grow'}.",
            f"The widest spread ({widest}) gives a gain of {times(gains[widest])}; the least gain is "
            f"{times(gains[least])} ({least}).",
            f"At temperature 1.3 {percent(hottest.share_cut)} of the answers run to the maximum of "
            f"{hottest.max_tokens:,} tokens: this model loses its thread and its end with it, so that answers are "
            "longer and more alike."
            if hottest.share_cut > greedy.share_cut + 0.2
            else "",
            "The gain follows the longest over the mean length, which temperature changes only by way of where answers "
            "end. Measured lengths, simulated gain.",
        ]
    )


SAMPLING_SPREAD = Claim(
    id="sampling-spread",
    title="Temperature and the spread of lengths",
    published="Higher temperature and top-p make lengths more variable, and so continuous batching worth more.",
    source="Articles on continuous batching, without a number",
    workload="not given",
    method="Answers of a model to the same prompts at temperatures 0 to 1.3 and top-p 0.9 and 1; continuous over "
    "static batching for these very lengths, in the simulator.",
    measure=measure_sampling_spread,
    engine="always",
)
