"""Running a server: memory that has to be reserved, options that have to be found, and what a token costs.

The memory of reserved requests is arithmetic over the shapes of models. Options and costs are simulated, since they are
about many runs, and about several replicas.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway_lab.claims.claim import Chart, Outcome, change, percent, sentences, times
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.published_workloads import Drawn, chat, draw, saturation
from headway_lab.claims.scenarios.batching_eras import CHUNKED, STATIC, EraRuns, era_runs
from headway_lab.claims.testbed import SimulatedTestbed
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.setup import set_up
from headway_lab.sim.simulate import Simulation, simulate
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_goal import Goal
from headway_lab.tune.tune_search import SearchLimits, Tuned, search
from headway_lab.workload.bench_requests import Work

# ---- memory that is reserved for the longest request ----------------------------------------------------------------


@dataclass(frozen=True)
class _KVShape:
    """What decides how large a token's keys and values are."""

    num_layers: int
    num_values: int
    """Numbers of a token's keys in one layer: KV heads × head size. Its values have as many."""
    num_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_values * self.num_bytes


_PUBLISHED_SHAPE = "70B, a KV head for each head, 8 bits"
_KV_SHAPES = {
    "70B, a KV head for each head, 16 bits": _KVShape(80, 8192, 2),
    _PUBLISHED_SHAPE: _KVShape(80, 8192, 1),
    "OPT-13B, 16 bits": _KVShape(40, 5120, 2),
    "Llama 3.1 70B, 8 KV heads, 16 bits": _KVShape(80, 1024, 2),
    "Llama 3.1 8B, 8 KV heads, 16 bits": _KVShape(32, 1024, 2),
}


def measure_reserved_kv(context: Context) -> Outcome:
    num_requests, num_tokens, block_size, published_gb = 100, 2_048, 16, 266.0
    drawn = chat(context, num_requests)
    lengths = [min(one.num_prompt_tokens + one.num_output_tokens, num_tokens) for one in drawn.work]
    num_paged = sum(-(-length // block_size) * block_size for length in lengths)
    reserved = {name: 1e-9 * shape.bytes_per_token * num_requests * num_tokens for name, shape in _KV_SHAPES.items()}
    share = num_paged / (num_requests * num_tokens)
    nearest = reserved[_PUBLISHED_SHAPE]
    return Outcome(
        value=nearest,
        unit="GB reserved",
        ours=f"{nearest:,.0f} GB for {_PUBLISHED_SHAPE}; in blocks of {block_size}, as the requests grow, at most "
        f"{share * nearest:,.0f} GB",
        workload=f"{num_requests} requests of up to {num_tokens:,} tokens; {drawn.text}, cut to that",
        differs=sentences(
            [
                f"{published_gb:,.0f} GB are {1e6 * published_gb / (num_requests * num_tokens):,.0f} kB a token. No "
                f"model is named; 80 layers of 8,192 numbers in 8 bits come within "
                f"{percent(abs(nearest / published_gb - 1))} of it.",
                f"Fewer KV heads make it {reserved['Llama 3.1 70B, 8 KV heads, 16 bits']:,.0f} GB for a 70B and "
                f"{reserved['Llama 3.1 8B, 8 KV heads, 16 bits']:,.0f} GB for an 8B today, reserved in 16 bits.",
                f"Paged, the requests hold at most {percent(share)} of what is reserved for them, even if all of them "
                "ended at the same time.",
            ]
        ),
        where="arithmetic",
        chart=Chart(
            f"KV memory reserved for {num_requests} requests of {num_tokens:,} tokens",
            "gigabytes",
            bars=reserved,
            notes={name: f"paged: at most {share * size:,.0f}" for name, size in reserved.items()},
        ),
        numbers={
            name: {
                "kB per token": 1e-3 * _KV_SHAPES[name].bytes_per_token,
                "reserved, GB": size,
                "paged at most, GB": share * size,
            }
            for name, size in reserved.items()
        },
        place="no machine",
    )


RESERVED_KV = Claim(
    id="reserved-kv",
    title="Memory of reserved requests",
    published="KV memory reserved for 100 requests of 2,048 tokens takes 266 GB.",
    source="Articles on continuous batching, without naming the model",
    workload="100 requests, each with memory for 2,048 tokens",
    method="Layers × KV heads × head size × bytes, twice, for every reserved token; beside it blocks of 16 tokens for "
    "requests of a chat's lengths. `headway plan MODEL` says the same of any model.",
    measure=measure_reserved_kv,
    engine="never",
)


# ---- options, found by hand or by search ----------------------------------------------------------------------------

_FLAGS = {"max_num_seqs": (6, 12, 64), "max_num_batched_tokens": (256, 1024, 4096)}
_DEFAULT, _TUNED = "default", "tuned"
_BOUNDS = {"p99_itl_ms": 25.0, "p99_ttft_ms": 1000.0}


def measure_tuning(context: Context) -> Outcome:
    eras = era_runs(context)
    gains = _gains_of_flags(context, eras)
    drawn = chat(context, context.sized(tiny=60, short=150, full=600))
    rate = 0.85 * saturation(context, "default", drawn)
    tuned = _tune(context, drawn.at_rate(rate))
    scores = {_DEFAULT: tuned.default, _TUNED: tuned.best}
    gain = tuned.best.score.goodput / max(tuned.default.score.goodput, 1e-9)
    low, high = min(gains.values()), max(gains.values())
    changes = {name: value for name, value in tuned.best.options.items() if value != tuned.default.options[name]}
    told = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items()) or "the default options"
    return Outcome(
        value=high,
        unit="× static",
        ours=f"two flags: {times(low)} to {times(high)} static; a search of {tuned.num_simulated} simulations: "
        f"{times(gain)} the goodput of the defaults",
        workload=f"the flags: {eras.workload}; the search: {len(drawn.work):,} requests, {drawn.text}, {rate:.3g}/s, "
        f"85% of what can be served; {', '.join(f'{name} ≤ {bound:g}' for name, bound in _BOUNDS.items())}",
        differs=sentences(
            [
                f"The best of {len(gains)} pairs is {max(gains, key=lambda name: gains[name])}, the worst "
                f"{min(gains, key=lambda name: gains[name])}; how many requests may run at once decides most of it.",
                f"The search found {told}: {tuned.best.score.goodput:.3g} good requests a second instead of "
                f"{tuned.default.score.goodput:.3g}.",
                "The published days are those of trying pairs under load on a GPU; a simulation replays minutes of "
                "load in a second.",
            ]
        ),
        where=context.where,
        chart=Chart(
            "Throughput by two flags",
            "times the throughput of static batches",
            bars=gains,
        ),
        numbers={
            **{name: {"to static": ratio} for name, ratio in gains.items()},
            **{
                name: {
                    "goodput, requests/s": trial.score.goodput,
                    "requests within bounds, %": 100 * trial.score.good_share,
                }
                for name, trial in scores.items()
            },
        },
    )


def _gains_of_flags(context: Context, eras: EraRuns) -> dict[str, float]:
    """The throughput of each pair of values over that of static batches, on the same requests in the same memory."""
    static, room = eras.runs[STATIC], {"kv_tokens": eras.kv_tokens, "max_model_len": eras.max_model_len}
    gains = {}
    for seqs, tokens in itertools.product(*_FLAGS.values()):
        options = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        name = f"{seqs} requests, {tokens:,} tokens a step"
        gains[name] = context.run(name, eras.work, **room, **options).total_tok_s / static.total_tok_s
    return gains


def _tune(context: Context, work: Work) -> Tuned:
    calibration = _calibration(context)
    goal = Goal.of([f"{name}={bound:g}" for name, bound in _BOUNDS.items()], work)
    num_trials = context.sized(tiny=4, short=10, full=24)
    context.say(f"searching: {num_trials} trials of {len(work):,} requests")
    return search(Space.of(calibration, work, {}), goal, work, limits=SearchLimits(num_trials))


TUNING = Claim(
    id="tuning",
    title="Finding the options",
    published="Tuning takes 2–3 days by hand, and two flags decide between 3× and 5× of static batching.",
    source="Guides to serving engines, without a single origin",
    workload="a service's own traffic",
    method="Nine pairs of --max-num-seqs and --max-num-batched-tokens against static batches in the same memory; then "
    "the search of `headway tune` under two bounds on latency. How long all of it took is this row's time.",
    measure=measure_tuning,
    engine="never",
)


# ---- the cost of traffic --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CostSetup:
    num_replicas: int = 4


_SETUP = _CostSetup()
_PLAIN, _CACHED, _ROUTED = "no cache", "cached, any replica", "cached, routed to its prefix"
_FLEETS = {
    _PLAIN: {"enable_prefix_caching": False, "router": "round-robin"},
    _CACHED: {"enable_prefix_caching": True, "router": "round-robin"},
    _ROUTED: {"enable_prefix_caching": True, "router": "prefix-aware"},
}


def measure_cost(context: Context) -> Outcome:
    drawn = _assistants(context, context.sized(tiny=80, short=800, full=3000))
    runs = {name: _fleet_run(context, name, drawn, options) for name, options in _FLEETS.items()}
    seconds = {name: run.busy_s for name, run in runs.items()}
    saved = {name: change(value, seconds[_PLAIN]) for name, value in seconds.items()}
    eras = era_runs(context)
    traffic = eras.ratio(CHUNKED)
    spent = {STATIC: 1.0, CHUNKED: 1 / traffic}
    return Outcome(
        value=100 * saved[_ROUTED],
        unit="% GPU time",
        ours=f"GPU time for the same traffic {percent(saved[_CACHED], signed=True)} with a prefix cache, "
        f"{percent(saved[_ROUTED], signed=True)} with routing to it; {times(traffic)} the traffic of static batching "
        "per GPU",
        workload=f"{len(drawn.work):,} requests, {drawn.text}; all at once, {_SETUP.num_replicas} replicas; traffic "
        f"per GPU: {eras.workload}",
        differs=sentences(
            [
                f"A prompt token that is found in a cache costs nothing: {percent(runs[_CACHED].hit_share)} are found "
                f"when any replica may get a request, {percent(runs[_ROUTED].hit_share)} when the router sends it "
                "where its beginning is.",
                "What is left is generating, which no cache shortens; so work with long answers saves less, and "
                "repeated questions, whose answers can be kept as a whole, save more.",
                f"{times(traffic)} the traffic on the same GPU is {percent(1 / traffic - 1, signed=True)} of the price "
                "of a token; `--price-per-hour` gives it in money.",
            ]
        ),
        where=context.where,
        chart=Chart(
            "GPU time of the same traffic",
            "seconds of all GPUs, busy",
            bars=seconds,
            notes={name: percent(value, signed=True) for name, value in saved.items() if name != _PLAIN},
        ),
        numbers={
            **{
                name: {
                    "GPU seconds": seconds[name],
                    "to no cache, %": 100 * saved[name],
                    "prompt tokens found, %": 100 * run.hit_share,
                }
                for name, run in runs.items()
            },
            **{name: {"GPU time per token, to static": share} for name, share in spent.items()},
        },
    )


@dataclass(frozen=True)
class _FleetRun:
    busy_s: float
    hit_share: float
    """Share of the prompt tokens that were found in a cache."""


def _fleet_run(context: Context, name: str, drawn: Drawn, options: dict[str, Any]) -> _FleetRun:
    engine = {key: value for key, value in options.items() if key != "router"}
    setup = set_up(_calibration(context), engine)
    context.say(f"{name}: {len(drawn.work):,} requests on {_SETUP.num_replicas} replicas")
    done: Simulation = simulate(
        drawn.at_once(),
        setup.machine,
        setup.scheduler,
        setup.cache,
        num_replicas=_SETUP.num_replicas,
        router=options["router"],
    )
    num_prompt_tokens = sum(one.num_prompt_tokens for one in drawn.work)
    return _FleetRun(done.busy_s, done.num_hit_tokens / num_prompt_tokens)


def _assistants(context: Context, count: int) -> Drawn:
    """Many assistants with long instructions of their own, and some users for each."""
    prefixes = count // 10
    content = {"kind": "shared_prefix", "prefixes": prefixes, "prefix_tokens": 2_000, "zipf": 0.8}
    lengths = {
        "input": {"kind": "lognormal", "median": 100, "sigma": 0.7, "cap": 500},
        "output": {"kind": "lognormal", "median": 60, "sigma": 0.6, "cap": 250},
    }
    text = f"{prefixes} assistants with instructions of 2,000 tokens, questions of about 100, answers of about 60"
    return draw(context, count, {**lengths, "content": content}, text)


def _calibration(context: Context) -> Calibration:
    if not isinstance(context.testbed, SimulatedTestbed):
        raise ConfigError("This claim is about several replicas or many options: it is only simulated.")
    return context.testbed.calibration


COST = Claim(
    id="cost",
    title="What traffic costs",
    published="Continuous batching carries 3–5× the traffic per GPU; caching and routing cut spending by 50–90%.",
    source="Articles on the cost of serving, without a single origin",
    workload="assistants with common instructions, several replicas",
    method="Busy GPU time of the same requests on four replicas: without a prefix cache, with one each, with a router "
    "that knows what they hold; and the throughput of continuous over static batching in the same memory.",
    measure=measure_cost,
    engine="never",
)
