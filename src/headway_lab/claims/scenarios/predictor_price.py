"""The price of a length predictor: the pairs that it has to see before it orders well, and the time of a prediction."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import ConfigError
from headway_lab.claims.claim import Chart, Line, Outcome, change, milliseconds, percent, sentences
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.published_workloads import CHAT_MAX_INPUT, CHAT_MAX_OUTPUT, Drawn, saturation
from headway_lab.claims.run import Run
from headway_lab.claims.scenarios.scheduling_policies import RANKING_MAX_NUM_SEQS, mean_per_token_s, run_in_order
from headway_lab.predictor.learning_curve import (
    Learned,
    Traffic,
    has_ranker,
    learn,
    made_up_traffic,
    observe,
    recorded_traffic,
)
from headway_lab.workload.bench_requests import BenchRequest

TRAFFIC_LOG = "traffic.jsonl"
"""A traffic log, as `headway serve --traffic-log` writes it."""
_PUBLISHED = {"pairs": 10_000, "shortest hours": 4, "longest hours": 6}


@dataclass(frozen=True)
class Plan:
    counts: Sequence[int]
    """Numbers of pairs to learn from, rising."""
    num_held_out: int
    """The requests that are predicted."""
    num_served: int
    """How often one of these, drawn anew each time, is sent to be served."""
    load: float = 1.5
    """Arrivals as a multiple of what can be served."""
    enough: float = 0.9
    """A predictor has learned when its rank correlation is this share of the last one."""


def measure_predictor_price(context: Context) -> Outcome:
    plan = _plan(context)
    traffic, source = _traffic(context, plan)
    counts = [count for count in plan.counts if count <= len(traffic.pairs)]
    if not counts or not traffic.held_out:
        raise ConfigError(
            f"'{TRAFFIC_LOG}' has {len(traffic.pairs)} pairs to learn from; at least {plan.counts[0]} are needed."
        )
    observed = [observe(traffic, count) for count in counts]
    curve = observed
    if has_ranker():
        context.say(f"training on {' / '.join(f'{count:,}' for count in counts)} pairs")
        curve = [learn(traffic, count) for count in counts]
    served = _serve(context, plan, traffic, curve)
    enough = next((one for one in curve if one.tau >= plan.enough * curve[-1].tau), curve[-1])
    fall = change(served.means_s[-1], served.fcfs_s)
    return Outcome(
        value=float(enough.num_pairs),
        unit="pairs",
        ours=f"{_learned_text(enough, curve[-1])}; mean latency per token {percent(fall, signed=True)}"
        + (f"; {_cost_text(curve[-1])}" if curve[-1].cost else ""),
        workload=f"{source}; {plan.num_served:,} requests, drawn from {len(traffic.held_out):,} others, Poisson, "
        f"{plan.load:g} times what can be served; at most {RANKING_MAX_NUM_SEQS} at a time",
        differs=_differs(curve, served, enough.num_pairs),
        where=context.where,
        chart=Chart(
            "What a predictor knows after so many pairs",
            "Kendall's tau, and share of an oracle's gain: 1 is perfect",
            lines=(
                Line(f"{_name(curve[-1])}: Kendall's tau", counts, [one.tau for one in curve]),
                Line(f"{_name(curve[-1])}: share of an oracle's gain in mean latency", counts, served.shares),
                *([] if curve is observed else [Line("statistics: Kendall's tau", counts, [o.tau for o in observed])]),
            ),
            x="pairs of a prompt and its answer's length",
            log_x=True,
        ),
        numbers=_numbers(curve, observed, served),
    )


def _plan(context: Context) -> Plan:
    if context.testbed.is_cpu:
        return Plan((100, 200), 60, 60)
    if context.is_quick:
        return Plan((100, 300, 1_000), 400, 800)
    return Plan((100, 300, 1_000, 3_000, 10_000), 1_000, 2_000)


def _traffic(context: Context, plan: Plan) -> tuple[Traffic, str]:
    file = context.data_file(TRAFFIC_LOG)
    if file is not None:
        traffic = recorded_traffic(file, num_held_out=plan.num_held_out, most_pairs=plan.counts[-1])
        return traffic, f"{len(traffic.pairs):,} pairs of {file.name}"
    traffic = made_up_traffic(plan.counts[-1], plan.num_held_out)
    source = f"{len(traffic.pairs):,} made-up pairs of 12 applications, in whose prompts some words tell the length"
    return traffic, source


# ---- what predictions are worth to a scheduler ----------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """The held-out requests, served in the order of arrival, of predictions, and of the true lengths."""

    fcfs: Run
    oracle_s: float
    means_s: Sequence[float]
    """The mean latency per token after each number of pairs."""
    top: float
    """Requests per second that can be served."""

    @property
    def fcfs_s(self) -> float:
        return mean_per_token_s(self.fcfs)

    @property
    def shares(self) -> list[float]:
        """The share of the oracle's gain after each number of pairs."""
        best = self.fcfs_s - self.oracle_s
        return [(self.fcfs_s - mean_s) / best if best > 0 else 0.0 for mean_s in self.means_s]


def _serve(context: Context, plan: Plan, traffic: Traffic, curve: Sequence[Learned]) -> Served:
    rng = random.Random("held out")
    chosen = rng.choices(range(len(traffic.held_out)), k=plan.num_served)
    drawn = _drawn(traffic, chosen, rng)
    top = saturation(context, "fcfs", drawn, max_num_seqs=RANKING_MAX_NUM_SEQS)
    work = drawn.at_rate(plan.load * top)

    def mean_s(label: str, lengths: Sequence[float]) -> float:
        return mean_per_token_s(run_in_order(context, label, work, [lengths[place] for place in chosen]))

    oracle_s = mean_s("oracle", [float(length) for length in traffic.lengths])
    means_s = [mean_s(f"after {one.num_pairs:,} pairs", one.lengths) for one in curve]
    return Served(run_in_order(context, "fcfs", work, None), oracle_s, means_s, top)


def _drawn(traffic: Traffic, chosen: Sequence[int], rng: random.Random) -> Drawn:
    """These of the held-out requests, one a second."""
    arrival_s, work = 0.0, []
    for record in (traffic.held_out[place] for place in chosen):
        arrival_s += rng.expovariate(1.0)
        prompt = range(min(record.features.keys.num_prompt_tokens, CHAT_MAX_INPUT))
        work.append(BenchRequest(prompt, min(record.num_output_tokens, CHAT_MAX_OUTPUT), arrival_s=arrival_s))
    return Drawn(work, "held-out requests")


# ---- the texts ------------------------------------------------------------------------------------------------------


def _learned_text(enough: Learned, last: Learned) -> str:
    if last.tau <= 0:
        return f"{last.num_pairs:,} pairs tell nothing about the order of lengths (Kendall tau {last.tau:.2f})"
    share = percent(enough.tau / last.tau)
    return (
        f"{enough.num_pairs:,} pairs give {share} of the rank correlation of {last.num_pairs:,} "
        f"(Kendall tau {last.tau:.2f})"
    )


def _numbers(curve: Sequence[Learned], observed: Sequence[Learned], served: Served) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for learned, simple, mean_s, share in zip(curve, observed, served.means_s, served.shares, strict=True):
        row = {
            "Kendall tau": learned.tau,
            "statistics' tau": simple.tau,
            "latency per token, ms": 1e3 * mean_s,
            "of an oracle's gain, %": 100 * share,
        }
        if learned.cost is not None:
            row |= {
                "training, µs a pair": 1e6 * learned.training_s / learned.num_pairs,
                "prediction, µs": 1e6 * learned.cost.single_s,
                "of 64 at once, µs": 1e6 * learned.cost.batched_s,
            }
        rows[f"{learned.num_pairs:,} pairs"] = row
    rows["fcfs"] = {"latency per token, ms": 1e3 * served.fcfs_s}
    rows["oracle"] = {"latency per token, ms": 1e3 * served.oracle_s}
    return rows


def _cost_text(learned: Learned) -> str:
    assert learned.cost is not None
    return f"{_us(learned.cost.single_s)} a prediction, {_us(learned.cost.batched_s)} each of 64 at once"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"


def _name(learned: Learned) -> str:
    return "statistics" if learned.cost is None else "learned ranker"


def _differs(curve: Sequence[Learned], served: Served, enough: int) -> str:
    last, num_requests = curve[-1], len(served.fcfs.timelines)
    num_steps = len(served.fcfs.num_running)
    pairs, low, high = _PUBLISHED["pairs"], _PUBLISHED["shortest hours"], _PUBLISHED["longest hours"]
    return sentences(
        [
            f"Published are {pairs:,} pairs from {low} to {high} hours of traffic, so "
            f"{pairs / high / 3600:.1f} to {pairs / low / 3600:.1f} requests/s. The simulated "
            f"machine serves {served.top:.3g}/s, and sees {enough:,} pairs in {milliseconds(enough / served.top)}; "
            f"what {last.num_pairs:,} pairs teach is {percent(served.shares[-1])} of an oracle's gain.",
            "The published milliseconds a step are a language model that ranks the queue. Here trees predict each "
            f"request once, when it arrives: that is {_us(last.cost.single_s * num_requests / num_steps)} "
            f"for each of the machine's steps of {milliseconds(served.fcfs.duration_s / num_steps)}, and in the server "
            f"a thread beside them. Training on {last.num_pairs:,} pairs took {milliseconds(last.training_s)} on one "
            "core."
            if last.cost is not None
            else "LightGBM is not installed, so this is the curve of running statistics, which learn while they serve.",
            "How far a predictor comes is a matter of the traffic: part of these lengths is chance, which it cannot "
            "foresee.",
        ]
    )


PREDICTOR_PRICE = Claim(
    id="predictor-price",
    title="Price of a length predictor",
    published="A length predictor needs 10,000 pairs, 4–6 hours of traffic, to learn from, and milliseconds a step.",
    source="Articles on continuous batching, of learned rankings",
    workload="the service's own traffic",
    method=f"The learned ranker, trained on growing numbers of pairs (made up, or {TRAFFIC_LOG} in --data-dir), orders "
    "others of the same traffic in the simulator; predictions are timed on this machine, on one thread.",
    measure=measure_predictor_price,
    engine="never",
)
