"""Load on continuous batching: at the same latency, by the size of the batch, and by the length of the queue."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
from time import process_time
from typing import Any

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, ModelRunnerOutput, Request, SampledTokens, Scheduler
from headway_lab.bench.capacity_search import Capacity
from headway_lab.bench.online_metrics import Objective
from headway_lab.claims.claim import Chart, Line, Outcome, milliseconds, sentences, times
from headway_lab.claims.context import NORMALISED, Claim, Context, Span, Variant, run_alternating
from headway_lab.claims.published_workloads import capacity_of, equal, orca, saturation

# ---- load at the same latency ---------------------------------------------------------------------------------------

_ORCA_STATIC, _DYNAMIC, _CONTINUOUS = "static, reserved", "dynamic, reserved", "continuous, paged"
_ORCA_MODES: dict[str, dict[str, Any]] = {
    _ORCA_STATIC: {"batching": "static", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    _DYNAMIC: {"batching": "dynamic", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    _CONTINUOUS: {},
}
_BOUND = 2.0
_ORCA_PUBLISHED = 36.9


def measure_orca(context: Context) -> Outcome:
    part = context.divisor
    max_model_len = 640 // part
    span = Span(
        seconds=10.0 if context.is_quick else 30.0, least=100, most=context.sized(tiny=100, short=1500, full=4000)
    )
    drawn = orca(context, span.most)
    lone = context.run("one at a time", drawn.at_rate(0.01, 12), max_model_len=max_model_len)
    bound_s = _BOUND * statistics.median(lone.per_token_s)
    start = 0.25 * saturation(context, "continuous", drawn, max_model_len=max_model_len)
    found = {
        mode: capacity_of(
            context,
            mode,
            drawn,
            [Objective(NORMALISED, 1e3 * bound_s)],
            start=start,
            span=span,
            max_model_len=max_model_len,
            **options,
        )
        for mode, options in _ORCA_MODES.items()
    }
    rates = {mode: capacity.rate or 0.0 for mode, capacity in found.items()}
    best_old = max(rates[_ORCA_STATIC], rates[_DYNAMIC])
    gain = rates[_CONTINUOUS] / best_old if best_old else float("inf")
    return Outcome(
        value=gain,
        unit="× static",
        ours=f"{times(gain)} the rate at a median of {milliseconds(bound_s)} per token",
        workload=f"{drawn.text}, Poisson, up to {span.most:,} requests at each rate{context.divided}",
        differs=_orca_differs(context, found, rates, bound_s, gain),
        where=context.where,
        chart=Chart(
            "Median latency per token against load",
            "median of (end − arrival) / tokens, ms",
            lines=tuple(_orca_line(mode, capacity) for mode, capacity in found.items()),
            x="requests per second",
            log_x=True,
            log_y=True,
            levels={f"twice a lone request's: {1e3 * bound_s:.3g} ms": 1e3 * bound_s},
            caption="The rates that the search tried: a mode's capacity is where its line crosses the bound.",
        ),
        numbers={mode: {"requests/s at the bound": rate} for mode, rate in rates.items()},
    )


def _orca_line(mode: str, capacity: Capacity) -> Line:
    probes = sorted(capacity.probes, key=lambda probe: probe.rate)
    ys = [float(probe.metrics.as_json()[NORMALISED] or 0.0) for probe in probes]
    return Line(mode, [probe.rate for probe in probes], ys)


def _orca_differs(
    context: Context, found: dict[str, Capacity], rates: dict[str, float], bound_s: float, gain: float
) -> str:
    best = found[_CONTINUOUS].best
    return sentences(
        [
            f"At the bound, twice a lone request's latency, static takes {rates[_ORCA_STATIC]:.3g}, "
            f"dynamic {rates[_DYNAMIC]:.3g} and continuous batching {rates[_CONTINUOUS]:.3g} requests/s.",
            f"Published are {times(_ORCA_PUBLISHED)} for a model of 175 billion parameters on 16 GPUs, whose base pads "
            "prompts, keeps computing for requests that are done and, since batches are formed outside of it, often "
            "runs small ones. Here both sides have the same kernels: static batches are as large as the limit of "
            f"{context.testbed.max_num_seqs} allows, are not padded, and finished requests compute nothing."
            if gain < _ORCA_PUBLISHED
            else "",
            f"Continuous batching had {best.metrics.peak_in_flight} requests in flight at most." if best else "",
        ]
    )


ORCA = Claim(
    id="orca",
    title="Load at the same latency",
    published="Iteration-level scheduling takes 36.9× the load of FasterTransformer at equal median latency per token.",
    source="Yu et al., Orca (OSDI 2022); GPT-3 175B",
    workload="in U(32, 512), out U(1, 128), Poisson",
    method="The highest Poisson rate at which the median normalised latency stays under twice that of a lone request.",
    measure=measure_orca,
    engine="asked",
)


# ---- batch size against throughput ----------------------------------------------------------------------------------

_SIZES = (1, 8, 32)
_BATCH_SIZE_PUBLISHED = (1.0, 6.0, 15.0)


def measure_batch_size(context: Context) -> Outcome:
    num_in, num_out = 128 // context.divisor, 256 // context.divisor
    drawn = equal(context, _SIZES[-1], num_in=num_in, num_out=num_out)
    turns = run_alternating(context, {f"batch of {size}": Variant(drawn.at_once(size), {}) for size in _SIZES})
    rates = [run.output_tok_s for run in turns.best.values()]
    ratios = [rate / rates[0] for rate in rates]
    steps_s = [size / rate for size, rate in zip(_SIZES, rates)]
    return Outcome(
        value=ratios[-1],
        unit="× at 32",
        ours=" / ".join(times(ratio) for ratio in ratios),
        workload=f"{drawn.text}, {' / '.join(map(str, _SIZES))} requests at once{context.divided}",
        differs=sentences(
            [_batch_size_differs(ratios, steps_s), turns.spread(f"batch of {_SIZES[-1]}", f"batch of {_SIZES[0]}")]
        ),
        where=context.where,
        chart=Chart(
            "Throughput over the size of the batch",
            "times the throughput of one request",
            lines=(
                Line("ours", list(_SIZES), ratios),
                Line("published", list(_SIZES), list(_BATCH_SIZE_PUBLISHED)),
                Line("each request as fast as alone", list(_SIZES), list(map(float, _SIZES))),
            ),
            x="requests in the batch",
            log_x=True,
            log_y=True,
        ),
        numbers={
            f"{size} at once": {"output tokens/s": rate, "to one": ratio, "ms per step": 1e3 * step_s}
            for size, rate, ratio, step_s in zip(_SIZES, rates, ratios, steps_s)
        },
    )


def _batch_size_differs(ratios: list[float], steps_s: list[float]) -> str:
    growth = steps_s[-1] / steps_s[0]
    if ratios[-1] > _BATCH_SIZE_PUBLISHED[-1]:
        return sentences(
            [
                f"A step for 32 requests takes {times(growth)} the time of one for a single request "
                f"({milliseconds(steps_s[-1])} against {milliseconds(steps_s[0])}, prompts included): reading the "
                "weights is nearly all of it, so the gain is larger than published, where more of a step grew with the "
                "batch.",
            ]
        )
    return sentences(
        [
            f"A step for 32 requests takes {times(growth)} the time of one for a single request "
            f"({milliseconds(steps_s[-1])} against {milliseconds(steps_s[0])}, prompts included): so most "
            "of it must be arithmetic, each request's own, and not reading the weights, which they share.",
        ]
    )


BATCH_SIZE = Claim(
    id="batch-size",
    title="Batch size and throughput",
    published="A batch of 8 gives 6× the throughput of one request, a batch of 32 gives 15×.",
    source="Rule of thumb from serving guides, without a single origin",
    workload="equal requests, batches of 1, 8 and 32",
    method="Equal requests all at once, 128 tokens in and 256 out; output tokens per second.",
    measure=measure_batch_size,
    engine="always",
)


# ---- guesses that are verified, by the size of the batch -------------------------------------------------------------

_SPECULATION_SIZES = (1, 4, 16, 64, 256)
_TOKENS_A_STEP = 2.5
_SPECULATION_PUBLISHED = {4: 2.5, 256: 0.88}


def measure_speculation(context: Context) -> Outcome:
    sizes = [size for size in _SPECULATION_SIZES if size <= context.sized(tiny=16, short=256, full=256)]
    drawn = equal(context, sizes[-1], num_in=128 // context.divisor, num_out=256 // context.divisor)
    ways: dict[str, dict[str, Any]] = {
        "": {"speculation": "off"},
        ", guessing": {"speculation": "ngram", "spec_synthetic_acceptance": _TOKENS_A_STEP},
    }
    variants = {
        f"{size} at once{name}": Variant(drawn.at_once(size), options)
        for size in sizes
        for name, options in ways.items()
    }
    try:
        context.testbed.use(speculation="ngram")
        runs = run_alternating(context, variants).best
    finally:
        context.testbed.use()
    plain = [runs[f"{size} at once"].output_tok_s for size in sizes]
    rates = [runs[f"{size} at once, guessing"].output_tok_s for size in sizes]
    ratios = [rate / base for rate, base in zip(rates, plain)]
    return Outcome(
        value=ratios[0],
        unit="× at 1",
        ours=f"{' / '.join(times(ratio) for ratio in ratios)} at {' / '.join(map(str, sizes))} at once",
        workload=(
            f"{drawn.text}, {' / '.join(map(str, sizes))} requests at once; guesses accepted at random, "
            f"{_TOKENS_A_STEP} tokens a step{context.divided}"
        ),
        differs=sentences(
            [
                f"How many guesses are verified is decided for each step by what they cost there. With {sizes[-1]} "
                f"requests at once that gives {times(ratios[-1])}, where a fixed number costs throughput.",
                f"Alone a request becomes {times(ratios[0])} as fast; {times(_TOKENS_A_STEP)} would be guesses that "
                "cost nothing.",
                "Here a guess costs a large part of a token: these cores compute hardly faster than they read weights."
                if ratios[0] < 1.25
                else "",
            ]
        ),
        where=context.where,
        chart=Chart(
            "Throughput with guesses over that without",
            "times the throughput without guesses",
            lines=(
                Line("ours", sizes, ratios),
                Line("published", list(_SPECULATION_PUBLISHED), list(_SPECULATION_PUBLISHED.values())),
            ),
            x="requests in the batch",
            log_x=True,
            levels={"without guesses": 1.0, "published, up to": 4.0},
        ),
        numbers={
            f"{size} at once": {"output tokens/s": base, "with guesses": rate, "ratio": ratio}
            for size, base, rate, ratio in zip(sizes, plain, rates, ratios)
        },
    )


SPECULATION = Claim(
    id="speculation",
    title="Speculative decoding under load",
    published="Guesses make a lone request 2–3× as fast, 2–4× by other accounts, best where memory is the limit; "
    "a fixed number gives 2.5× at 4 requests, 0.88× at 256.",
    source="Leviathan et al., Fast inference by speculative decoding (ICML 2023); reports on serving engines",
    workload="chat requests, 4 to 256 at once",
    method="Equal requests, 128 tokens in and 256 out; guesses accepted at random with a mean of 2.5 tokens a step.",
    measure=measure_speculation,
    engine="always",
)


# ---- the scheduler alone with a long queue, and a model that answers at once ----------------------------------------

_DEPTHS = (1_000, 10_000, 100_000)
_NUM_RUNNING = 64
_BLOCK_SIZE = 16
_WARM_UP = 40
_TOKEN = SampledTokens((7,))


def measure_queue_depth(context: Context) -> Outcome:
    num_rounds, num_steps = (6, 25) if context.is_quick else (20, 50)
    context.say(f"making {sum(_DEPTHS):,} requests")
    queues = {depth: _Queue(depth) for depth in _DEPTHS}
    gc.collect()
    gc.freeze()
    for queue in queues.values():
        for _ in range(_WARM_UP):
            queue.step()
    times_s: dict[int, list[float]] = {depth: [] for depth in _DEPTHS}
    for _ in range(num_rounds):  # in turns, so that a busy machine is busy for all
        for depth, queue in queues.items():
            times_s[depth] += [queue.step() for _ in range(num_steps)]
    gc.unfreeze()
    step_us = {depth: 1e6 * statistics.fmean(values) for depth, values in times_s.items()}
    ratio = step_us[_DEPTHS[-1]] / step_us[_DEPTHS[0]]
    return Outcome(
        value=ratio,
        unit="× for 100 times the queue",
        ours=f"{times(ratio)} when the queue is 100 times as long "
        f"({' / '.join(f'{us:,.0f}' for us in step_us.values())} µs a step)",
        workload=f"{_NUM_RUNNING} requests run, {' / '.join(f'{depth:,}' for depth in _DEPTHS)} wait; fcfs; processor "
        f"time of schedule() and update(), mean of {num_rounds * num_steps} steps",
        differs=sentences(
            [
                "The queue is a line whose first places are looked at, however many stand behind them, so a step costs "
                "what changes in it. The published cost comes from going through the whole queue, or sorting it, in "
                f"every step: that would make {times(_DEPTHS[-1] / _DEPTHS[0])} of it.",
            ]
        ),
        where="scheduler",
        chart=Chart(
            "Cost of scheduling a step over the length of the queue",
            "microseconds per step",
            lines=(
                Line("measured", list(_DEPTHS), list(step_us.values())),
                Line(
                    "doubles with the queue (published)",
                    list(_DEPTHS),
                    [step_us[_DEPTHS[0]] * depth / _DEPTHS[0] for depth in _DEPTHS],
                ),
            ),
            x="waiting requests",
            log_x=True,
            log_y=True,
        ),
        numbers={f"{depth:,} waiting": {"µs per step": us} for depth, us in step_us.items()},
        place="the scheduler alone, on this host",
    )


class _Queue:
    """A scheduler with a full batch and `depth` requests in the queue. A request that ends is replaced, so the load
    stays the same."""

    def __init__(self, depth: int) -> None:
        config = SchedulerConfig(max_num_seqs=_NUM_RUNNING, max_num_batched_tokens=8192).resolve("cpu")
        self._scheduler = Scheduler(config, KVCacheManager(num_blocks=64 * _NUM_RUNNING, block_size=_BLOCK_SIZE))
        self._rng = random.Random(0)
        self._ids = itertools.count()
        self._now_s = 0.0
        for _ in range(_NUM_RUNNING + depth):
            self._add()

    def step(self) -> float:
        """Run one step; return the processor time of planning it and of taking in its result."""
        started = process_time()
        output = self._scheduler.schedule(now_s=self._now_s)
        planned = process_time()
        result = ModelRunnerOutput({s.request_id: _TOKEN for s in output.scheduled if s.samples}, {})
        answered = process_time()
        updates = self._scheduler.update(output, result, duration_s=0.01)
        spent = process_time() - answered + planned - started
        self._now_s += 0.01
        for update in updates:
            if update.finish_status is not None:
                self._add()
        return spent

    def _add(self) -> None:
        length = self._rng.randint(16, 256)
        request = Request(f"r{next(self._ids)}", range(length), max_tokens=self._rng.randint(16, 256))
        self._scheduler.add_request(request, now_s=self._now_s)


QUEUE_DEPTH = Claim(
    id="queue-depth",
    title="Scheduling cost and queue depth",
    published="The time to schedule a step doubles when the queue doubles.",
    source="Reports from users of serving engines, without a single origin",
    workload="a growing queue behind a full batch",
    method="Processor time of the scheduler alone, 1,000 to 100,000 waiting, in turns.",
    measure=measure_queue_depth,
    engine="never",
)
