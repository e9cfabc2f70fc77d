"""Routing between many replicas: what a decision costs, and what it is worth.

    python benchmarks/routing.py cost                                      µs a request, by replicas and indexed blocks
    python benchmarks/routing.py scale mooncake --data-dir DIR    simulated, 1 to 256 replicas

`cost` routes prompts of 64 blocks, of which a replica holds 32, and tells the router of each one's tokens and end. With
`--shared N` all replicas hold the first N, as of a system prompt. Costs are processor time; the best of `--repeats`.

`scale` runs the simulator with the server's router. Each replica has the same rate: a part of what one can serve while
its batch is full. There are as many requests as replicas need, in whole copies of the workload that start one after the
other within a tenth of the time. A copy has prompts of its own (a salt), so that nothing is found only because the work
is repeated. `one cache` is what would be found in the memory of all replicas together, in whole blocks, by requests
that come in the same order and are computed at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import resource
import time
from collections import OrderedDict
from collections.abc import Sequence

from headway.config import ModelConfig
from headway.core import Request
from headway.core.kv.cache_report import MAX_REPORTED, CacheReport
from headway.front.router import ROUTERS, Router
from headway.loader.chosen_model import load_model_tokenizer
from headway.tokenizer import Tokenizer
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.sim.calibration import Calibration, Machine
from headway_lab.sim.setup import set_up
from headway_lab.sim.sim_comparison import capacity
from headway_lab.sim.simulate import Simulation, simulate
from headway_lab.workload.bench_requests import BenchRequest
from headway_lab.workload.workload_file import load_workload

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
                costs = [
                    cost_of(name, num_replicas, num_blocks, options.requests, options.shared)
                    for _ in range(options.repeats)
                ]
                print(f"{min(costs):>14.1f}", end="", flush=True)
            print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:>8,.0f}", flush=True)


def cost_of(name: str, num_replicas: int, num_blocks: int, num_requests: int, num_shared: int = 0) -> float:
    """µs of a request: its decision, a first and a second token, its end."""
    router = Router(name, block_size=BLOCK_SIZE)
    each = num_blocks // num_replicas
    shared = [digest((1 << 64) + block) for block in range(num_shared)]
    for place in range(num_replicas):
        router.add(place, max_num_seqs=256)
        if router.needs_digests:
            for number, first in enumerate(range(0, each, MAX_REPORTED)):
                own = range(place * each + first, place * each + min(first + MAX_REPORTED, each))
                blocks = [digest(block) for block in own] + (shared if number == 0 else [])
                assert router.index.take(place, CacheReport(number, blocks))
    prompts = []
    for number in range(num_requests):
        start = (number * 7919) % num_replicas * each
        known = shared + [digest(start + block) for block in range(NUM_PROMPT_BLOCKS // 2 - num_shared)]
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
    tokenizer = embedded_tokenizer() if workload.needs_tokenizer else None
    own = workload.draw(vocab_size=calibration.vocab_size, rate=1.0, tokenizer=tokenizer)
    most = capacity(own, calibration, {})
    rate = options.rate or options.load * most
    print(f"{len(own):,} requests a copy; a replica serves {most:.1f}/s with a full batch, and gets {rate:.1f}/s\n")
    print(
        f"{'replicas':>9} {'router':<14}{'requests':>9}{'req/s':>9}{'tok/s':>11}{'TTFT P50':>10}{'P99, ms':>9}"
        f"{'hits':>8}{'one cache':>11}{'busy':>7}{'took s':>8}"
    )
    for num_replicas in options.replicas:
        work = copies(own, math.ceil(num_replicas * options.requests / len(own)), rate * num_replicas)
        for name in ROUTERS if num_replicas > 1 else ["round-robin"]:
            started_s = time.perf_counter()
            done = simulate(work, setup.machine, setup.scheduler, setup.cache, num_replicas=num_replicas, router=name)
            show(name, work, done, setup.machine, time.perf_counter() - started_s)


def copies(work: Sequence[BenchRequest], count: int, rate: float) -> list[BenchRequest]:
    """The work so many times at this rate in all. Its own is 1/s."""
    made: list[BenchRequest] = []
    duration_s = work[-1].arrival_s * count / rate
    for number in range(count):
        options = dataclasses.replace(work[0].options, cache_salt=f"copy {number}")
        first, start_s = len(made), 0.1 * duration_s * number / count
        made += [
            dataclasses.replace(
                request,
                arrival_s=start_s + request.arrival_s * count / rate,
                after=None if request.after is None else first + request.after,
                options=options,
            )
            for request in work
        ]
    return made


def found_in_one(work: Sequence[BenchRequest], done: Simulation, num_blocks: int) -> float:
    """Which part of prompts' tokens one cache of so many blocks has, least recently used ones evicted."""
    held: OrderedDict[bytes, None] = OrderedDict()
    num_found = num_asked = 0
    for index in sorted(range(len(work)), key=lambda index: done.timelines[index].arrival_s):
        prompt = work[index].prompt_token_ids
        request = Request(str(index), prompt, max_tokens=1, options=work[index].options)
        digests = request.block_digests(BLOCK_SIZE, len(prompt) // BLOCK_SIZE)
        # The last token of a prompt is computed in any case.
        known = itertools.takewhile(held.__contains__, digests[: (len(prompt) - 1) // BLOCK_SIZE])
        num_found += BLOCK_SIZE * sum(1 for _ in known)
        num_asked += len(prompt)
        for block in reversed(digests):
            held[block] = None
            held.move_to_end(block)
        while len(held) > num_blocks:
            held.popitem(last=False)
    return num_found / num_asked


def show(name: str, work: Sequence[BenchRequest], done: Simulation, machine: Machine, took_s: float) -> None:
    metrics, num_replicas = OnlineMetrics.of(done.timelines, done.duration_s), len(done.num_routed)
    ttft = metrics.latencies["ttft"].percentiles
    hits = done.num_hit_tokens / done.num_queried_tokens if done.num_queried_tokens else 0.0
    most = found_in_one(work, done, machine.num_blocks * num_replicas)
    busy = done.busy_s / (done.duration_s * num_replicas)
    print(
        f"{num_replicas:>9} {name:<14}{len(work):>9,}{len(work) / done.duration_s:>9.1f}{metrics.output_tok_s:>11,.0f}"
        f"{ttft[50]:>10.1f}{ttft[99]:>9.1f}{hits:>8.1%}{most:>11.1%}{busy:>7.0%}{took_s:>8.1f}",
        flush=True,
    )


def embedded_tokenizer() -> Tokenizer:
    tokenizer = load_model_tokenizer(ModelConfig())
    assert tokenizer is not None
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    deciding = commands.add_parser("cost")
    deciding.add_argument("--replicas", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    deciding.add_argument(
        "--blocks", nargs="+", type=int, default=[100_000, 10_000_000], help="indexed, of all replicas"
    )
    deciding.add_argument("--requests", type=int, default=5000)
    deciding.add_argument("--shared", type=int, default=0, help="blocks that all prompts begin with, 31 at most")
    deciding.add_argument("--repeats", type=int, default=3)
    deciding.set_defaults(run=cost)
    simulated = commands.add_parser("scale")
    simulated.add_argument("workload", help="a workload file")
    simulated.add_argument("--data-dir")
    simulated.add_argument("--calibration", default="h200-llama31-8b")
    simulated.add_argument("--replicas", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    simulated.add_argument("--load", type=float, default=0.75, help="of each replica, a part of what it can serve")
    simulated.add_argument("--rate", type=float, help="requests/s of each replica, instead of that")
    simulated.add_argument("--requests", type=int, default=200, help="of each replica at least; whole copies")
    simulated.add_argument("--num-kv-blocks", type=int, help="of each replica")
    simulated.set_defaults(run=scale)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
