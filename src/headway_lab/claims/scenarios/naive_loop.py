"""A naive loop over transformers' `generate`, one request at a time and in fixed batches, beside Headway: how much
of the gain is the program, and how much is batching. The simulator has Headway's side of it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from headway_lab.claims.claim import Chart, Outcome, sentences, times
from headway_lab.claims.context import AlternatingRuns, Claim, Context, Variant, run_alternating
from headway_lab.claims.published_workloads import spread_answers
from headway_lab.claims.rectangular import rectangular
from headway_lab.claims.scenarios.padding import SEALING
from headway_lab.claims.testbed import EngineTestbed
from headway_lab.claims.transformers_loop import TransformersLoop, check_installed
from headway_lab.workload.bench_requests import BenchRequest

_THEIRS, _OURS = "transformers", "Headway"
_ONE, _BATCHES, _CONTINUOUS = "one at a time", "fixed batches", "continuous batching"
_SIZE, _CPU_QUICK_SIZE = 16, 4
_PUBLISHED = "24× on LLaMA-13B, 3–5× on an H100"


@dataclass(frozen=True)
class Loops:
    """Tokens that were asked for, per second: by way, of each program."""

    ours: Mapping[str, float]
    theirs: Mapping[str, float]
    """Empty in the simulator."""
    number_formats: str
    turns: AlternatingRuns

    @property
    def rates(self) -> dict[str, float]:
        theirs = {f"{_THEIRS}, {way}": rate for way, rate in self.theirs.items()}
        return theirs | {f"{_OURS}, {way}": rate for way, rate in self.ours.items()}

    @property
    def base(self) -> float:
        """The rate of the naive loop, or where there is none, of one request at a time."""
        return next(iter(self.rates.values()))


def measure_naive_loop(context: Context) -> Outcome:
    testbed = context.testbed if isinstance(context.testbed, EngineTestbed) else None
    if testbed is not None:
        check_installed()
    drawn = spread_answers(context, context.sized(tiny=8, short=32, full=400, gpu=48))
    size = context.sized(tiny=_CPU_QUICK_SIZE, short=_SIZE, full=_SIZE)
    loops = _measure(context, testbed, drawn.at_once(), size)
    ratios = {name: rate / loops.base for name, rate in loops.rates.items()}
    value = ratios[f"{_OURS}, {_CONTINUOUS}"]
    first = next(iter(ratios))
    return Outcome(
        value=value,
        unit=f"× {first}",
        ours=f"{times(value)} {first}"
        + "".join(f"; {name} {times(ratio)}" for name, ratio in list(ratios.items())[1:-1]),
        workload=f"{drawn.text}, all at once; fixed batches of {size}{context.divided}",
        differs=_differs(loops),
        where=context.where,
        chart=Chart(
            "Tokens per second of a naive loop and of Headway",
            "output tokens per second",
            bars=loops.rates,
            notes={name: times(ratio) for name, ratio in ratios.items()},
        ),
        numbers={name: {"output tokens/s": rate, f"to {first}": ratios[name]} for name, rate in loops.rates.items()},
    )


def _measure(context: Context, testbed: EngineTestbed | None, work: Sequence[BenchRequest], size: int) -> Loops:
    num_tokens = sum(one.num_output_tokens for one in work)
    turns = run_alternating(
        context,
        {
            _ONE: Variant(work, {"max_num_seqs": 1}),
            _BATCHES: Variant(rectangular(work, size), {**SEALING, "max_num_seqs": size}),
            _CONTINUOUS: Variant(work, {}),
        },
    )
    ours = {way: num_tokens / run.duration_s for way, run in turns.best.items()}
    if testbed is None:
        return Loops(ours, {}, "", turns)
    engine = testbed.engine()
    plan, model = engine.plan, engine.config.model
    dtype = "float32" if testbed.is_cpu else engine.model_config.torch_dtype
    options = {"device": plan.device, "dtype": dtype}
    del engine
    with testbed.set_aside():
        seconds = _theirs_s(context, model, options, work, {_ONE: 1, _BATCHES: size})
    theirs = {way: num_tokens / taken_s for way, taken_s in seconds.items()}
    return Loops(ours, theirs, f"transformers computes in {dtype}, Headway here in {plan.dtype}.", turns)


def _theirs_s(
    context: Context, model: Any, options: Mapping[str, Any], work: Sequence[BenchRequest], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Seconds of the whole work in transformers, by way: the fastest round, of which a quick run has one."""
    started_s = perf_counter()
    loop = TransformersLoop.load(model, **options)
    context.say(f"loaded in {_THEIRS} in {perf_counter() - started_s:.0f} s")
    num_threads = loop.warm_up(work[0])
    context.say(f"{_THEIRS} runs with {num_threads} thread{'s' if num_threads > 1 else ''} here")
    best: dict[str, float] = {}
    for _ in range(1 if context.is_quick else context.num_rounds):
        for way, size in sizes.items():
            label = f"{_THEIRS}, {way}"
            context.say(f"{label}: {len(work):,} requests")
            with context.bar(len(work), label) as progress:
                taken_s = loop.seconds(work, size, progress)
            best[way] = min(taken_s, best.get(way, taken_s))
    return best


def _differs(loops: Loops) -> str:
    batching = loops.ours[_CONTINUOUS] / loops.ours[_ONE]
    rectangles = loops.ours[_CONTINUOUS] / loops.ours[_BATCHES]
    if not loops.theirs:
        return sentences(
            [
                f"Headway's side alone: transformers is not simulated. With the same kernels, batching gives "
                f"{times(batching)} of one request at a time, and continuous batching {times(rectangles)} of padded "
                f"batches; the published {_PUBLISHED} have a slower program as their base.",
            ]
        )
    program = loops.ours[_ONE] / loops.theirs[_ONE]
    return sentences(
        [
            f"It is the product of two gains: one request at a time Headway is {times(program)} as fast as "
            f"transformers, by its kernels and number formats, and batching gives {times(batching)} more.",
            f"Against fixed batches of transformers it is {times(loops.ours[_CONTINUOUS] / loops.theirs[_BATCHES])}, "
            f"against the same padded batches in Headway {times(rectangles)}.",
            loops.number_formats,
            f"Published are {_PUBLISHED}. There a GPU reads its weights once for a whole batch and batching gives most "
            "of it; on a CPU arithmetic, which each request brings, limits it."
            if batching < program
            else f"Published are {_PUBLISHED}.",
            loops.turns.spread_of_times(_CONTINUOUS, _ONE),
        ]
    )


NAIVE_LOOP = Claim(
    id="naive-loop",
    title="A naive loop",
    published="vLLM serves 24× the load of Hugging Face transformers; a whole stack is 3–5× a naive PyTorch loop.",
    source="Kwon et al., vLLM's first post (2023), LLaMA-13B on an A100; articles on an H100, without a single origin",
    workload="ShareGPT lengths; requests one after the other or in fixed batches",
    method="generate of transformers, one by one and in padded batches, and Headway: same model, prompts and tokens.",
    measure=measure_naive_loop,
    engine="always",
)
