"""Prefill and decode apart or together, simulated: a table over prompt length and load.

    python benchmarks/roles_sim.py                            two replicas together against prefill=1,decode=1
    python benchmarks/roles_sim.py --roles prefill=1,decode=3 --load 0.7 --inputs 4096

Prompts have half to one and a half of a length, answers likewise, nothing is shared, and requests arrive at random. The
load is a part of what the replicas serve together with full batches. Every line is a mean over `--seeds` draws. Nothing
here is measured but what the calibration was made of.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence

from headway.front.roles import Roles
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.cost_model import Link
from headway_lab.sim.setup import set_up
from headway_lab.sim.sim_comparison import capacity
from headway_lab.sim.simulate import Simulation, simulate
from headway_lab.workload.bench_requests import BenchRequest

SPREAD = (0.5, 1.5)
HIGHEST_TOKEN_ID = 10_000
LATENCIES = (("ttft", 50), ("ttft", 99), ("itl", 99), ("e2el", 50))


def work_of(number: int, rate: float, num_in: int, num_out: int, seed: int) -> list[BenchRequest]:
    rng, now_s, work = random.Random(seed), 0.0, []
    for _ in range(number):
        now_s += rng.expovariate(rate)
        lengths = [int(length * rng.uniform(*SPREAD)) for length in (num_in, num_out)]
        prompt = [rng.randint(0, HIGHEST_TOKEN_ID) for _ in range(lengths[0])]
        work.append(BenchRequest(prompt, lengths[1], arrival_s=now_s))
    return work


def cells(runs: Sequence[Simulation]) -> str:
    """Means over the draws."""
    found = [OnlineMetrics.of(run.timelines, run.duration_s) for run in runs]
    served = statistics.fmean(metrics.requests_s for metrics in found)
    latencies = [
        statistics.fmean(metrics.latencies[name].percentiles[percent] for metrics in found)
        for name, percent in LATENCIES
    ]
    sent = statistics.fmean(run.num_elsewhere / len(run.timelines) for run in runs)
    waits_ms = [1e3 * (transfer.to_s - transfer.asked_s) for run in runs for transfer in run.transfers]
    hidden = statistics.fmean(run.hidden_share for run in runs)
    told = f"{sent:.0%} | {statistics.fmean(waits_ms):.1f} | {hidden:.0%}" if waits_ms else "| | "
    return f"{served:.1f} | {latencies[0]:.0f} / {latencies[1]:.0f} | {latencies[2]:.1f} | {latencies[3]:,.0f} | {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", default="h200-llama31-8b")
    parser.add_argument("--roles", type=Roles.parse, default=Roles(1, 1))
    parser.add_argument("--inputs", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--load", nargs="+", type=float, default=[0.3, 0.6, 0.8])
    parser.add_argument("--links", nargs="+", type=float, default=[450.0, 25.0], help="GB/s")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals, about")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--router", default="prefix-aware")
    options = parser.parse_args()
    calibration, roles = Calibration.find(options.calibration), options.roles
    print(
        "| prompt | load | rate/s | | served/s | TTFT P50 / P99 | ITL P99 | E2E P50 | elsewhere | transfer | hidden |"
    )
    print("|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|")
    for num_in in options.inputs:
        most = roles.num_replicas * capacity(work_of(200, 1.0, num_in, options.output, 0), calibration, {})
        for load in options.load:
            rate = load * most
            number = max(int(options.seconds * rate), 100)
            works = [work_of(number, rate, num_in, options.output, seed) for seed in range(options.seeds)]
            first = f"| {num_in:,} | {load:.0%} | {rate:.1f} |"
            for link in (None, *map(Link, options.links)):
                setup = set_up(calibration, {}, link=link)
                runs = [
                    simulate(
                        work,
                        setup.machine,
                        setup.scheduler,
                        setup.cache,
                        num_replicas=roles.num_replicas,
                        router=options.router,
                        roles=None if link is None else roles,
                        seed=seed,
                    )
                    for seed, work in enumerate(works)
                ]
                name = "together" if link is None else f"apart, {link.gb_s:g} GB/s"
                print(f"{first} {name} | {cells(runs)} |", flush=True)
                first = "| | | |"


if __name__ == "__main__":
    main()
