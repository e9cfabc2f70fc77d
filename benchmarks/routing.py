"""Routing between many replicas: what a decision costs, and what it is worth.

    python benchmarks/routing.py cost                                      µs a request, by replicas and indexed blocks
    python benchmarks/routing.py scale workloads/conversations.toml --rate 8     simulated, 1 to 256 replicas

`cost` routes prompts of 64 blocks, of which a replica holds 32, and tells the router of each one's tokens and end. In
`scale` each replica has the same rate and number of requests, in the simulator, with the server's router; `one cache`
is a single replica with all requests and the blocks of all. Costs are processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

from headway.core.routing import MAX_REPORTED, ROUTERS, CacheReport, Router
from headway.lab.bench.online_metrics import OnlineMetrics
from headway.lab.sim.calibration import Calibration
from headway.lab.sim.setup import Setup, set_up
from headway.lab.sim.simulate import Simulation, simulate
from headway.lab.workload.workload_file import load_workload

NUM_PROMPT_BLOCKS = 64
BLOCK_SIZE = 64


def digest(number: int) -> bytes:
    """One of a block, as long as the real ones."""
    return number.to_bytes(16, "little")


def cost(options: argparse.Namespace) -> None:
    print(f"{'replicas':>9}{'blocks':>12}  " + "".join(f"{name:>14}" for name in ROUTERS) + f"{'MB':>8}")
    for num_replicas in options.replicas:
        for num_blocks in options.blocks:
            print(f"{num_replicas:>9}{num_blocks:>12,}  ", end="", flush=True)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for name in ROUTERS:
                print(f"{cost_of(name, num_replicas, num_blocks, options.requests):>14.1f}", end="", flush=True)
            print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:>8,.0f}", flush=True)


def cost_of(name: str, num_replicas: int, num_blocks: int, num_requests: int) -> float:
    """µs of a request: its decision, a first and a second token, its end."""
    router = Router(name, block_size=BLOCK_SIZE)
    each = num_blocks // num_replicas
    for place in range(num_replicas):
        router.add(place, max_num_seqs=256)
        if router.needs_digests:
            for number, first in enumerate(range(0, each, MAX_REPORTED)):
                own = range(place * each + first, place * each + min(first + MAX_REPORTED, each))
                assert router.index.take(place, CacheReport(number, [digest(block) for block in own]))
    prompts = []
    for number in range(num_requests):
        start = (number * 7919) % num_replicas * each
        known = [digest(start + block) for block in range(NUM_PROMPT_BLOCKS // 2)]
        new = [digest(num_blocks + number * NUM_PROMPT_BLOCKS + block) for block in range(NUM_PROMPT_BLOCKS // 2)]
        prompts.append(known + new)
    open_ids: list[str] = []
    started_s = time.process_time()
    for number, prompt in enumerate(prompts):
        request_id = str(number)
        router.route(
            request_id,
            num_prompt_tokens=NUM_PROMPT_BLOCKS * BLOCK_SIZE,
            num_answer_tokens=100,
            digests=lambda prompt=prompt: prompt,
        )
        open_ids.append(request_id)
        if len(open_ids) > 8 * num_replicas:
            ended = open_ids[number - 8 * num_replicas]
            router.note_tokens(ended, 1)
            router.note_tokens(ended, 1)
            router.end(ended)
    return (time.process_time() - started_s) / num_requests * 1e6


def scale(options: argparse.Namespace) -> None:
    calibration = Calibration.find(options.calibration)
    setup = set_up(calibration, {} if options.num_kv_blocks is None else {"num_kv_blocks": options.num_kv_blocks})
    workload = load_workload(options.workload, data_dir=options.data_dir)
    print(
        f"{'replicas':>9} {'router':<14}{'req/s':>9}{'tok/s':>11}{'TTFT P50':>10}{'P99, ms':>9}{'hits':>8}{'took s':>8}"
    )
    for num_replicas in options.replicas:
        work = workload.draw(
            vocab_size=calibration.vocab_size,
            num_requests=options.requests * num_replicas,
            rate=options.rate * num_replicas,
        )
        for name in ROUTERS if num_replicas > 1 else ["round-robin"]:
            started_s = time.perf_counter()
            done = simulate(work, setup.machine, setup.scheduler, setup.cache, num_replicas=num_replicas, router=name)
            show(str(num_replicas), name, done, len(work), time.perf_counter() - started_s)
        if num_replicas > 1 and num_replicas <= options.most_for_one:
            show(str(num_replicas), "one cache", simulate(work, *large(setup, num_replicas)), len(work), 0.0)


def large(setup: Setup, factor: int) -> tuple:
    """One replica with as many blocks as so many have."""
    machine = dataclasses.replace(setup.machine, num_blocks=setup.machine.num_blocks * factor)
    return machine, setup.scheduler, setup.cache


def show(num_replicas: str, name: str, done: Simulation, num_requests: int, took_s: float) -> None:
    metrics = OnlineMetrics.of(done.timelines, done.duration_s)
    ttft = metrics.latencies["ttft"].percentiles
    hits = done.num_hit_tokens / done.num_queried_tokens if done.num_queried_tokens else 0.0
    print(
        f"{num_replicas:>9} {name:<14}{num_requests / done.duration_s:>9.1f}{metrics.output_tok_s:>11,.0f}"
        f"{ttft[50]:>10.1f}{ttft[99]:>9.1f}{hits:>8.1%}{took_s:>8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    deciding = commands.add_parser("cost")
    deciding.add_argument("--replicas", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    deciding.add_argument(
        "--blocks", nargs="+", type=int, default=[100_000, 10_000_000], help="indexed, of all replicas"
    )
    deciding.add_argument("--requests", type=int, default=5000)
    deciding.set_defaults(run=cost)
    simulated = commands.add_parser("scale")
    simulated.add_argument("workload", help="a workload file")
    simulated.add_argument("--data-dir")
    simulated.add_argument("--calibration", default="h200-llama31-8b")
    simulated.add_argument("--replicas", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    simulated.add_argument("--rate", type=float, default=8.0, help="requests/s of each replica")
    simulated.add_argument("--requests", type=int, default=200, help="of each replica")
    simulated.add_argument("--num-kv-blocks", type=int, help="of each replica")
    simulated.add_argument("--most-for-one", type=int, default=16, help="replicas up to which `one cache` is simulated")
    simulated.set_defaults(run=scale)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
