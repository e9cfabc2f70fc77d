"""How much of the allocated KV memory holds no token, on a trace of real request lengths.

Replays a CSV with the columns arrival_s, input_tokens, output_tokens through the real scheduler and cache. Steps take a
fixed virtual time; the model is left out, since only lengths matter. Waste is (allocated - used) / allocated slots,
summed over all steps.

    python benchmarks/kv_waste.py TRACE.csv --block-size 16
"""

from __future__ import annotations

import argparse
import csv

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, ModelRunnerOutput, Request, SampledTokens, Scheduler, check_invariants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16])
    parser.add_argument("--kv-tokens", type=int, default=131_072, help="size of the KV cache")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=20.0, help="virtual time of a step")
    options = parser.parse_args()
    with open(options.trace, newline="") as file:
        rows = [(float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    for block_size in options.block_size:
        replay(rows, block_size, options)


def replay(rows: list[tuple[float, int, int]], block_size: int, options: argparse.Namespace) -> None:
    """Run the whole trace and print one line."""
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens
    ).resolve("cpu")
    scheduler = Scheduler(config, KVCacheManager(num_blocks=options.kv_tokens // block_size, block_size=block_size))
    allocated = used = preemptions = num_steps = batch = 0
    arrivals = iter(sorted(rows))
    upcoming = next(arrivals, None)
    index = 0
    while upcoming is not None or scheduler.has_unfinished_requests:
        while upcoming is not None and upcoming[0] <= num_steps * options.step_ms / 1e3:
            _, num_input, num_output = upcoming
            scheduler.add_request(Request(f"r{index}", range(max(1, num_input)), max_tokens=max(1, num_output)))
            index += 1
            upcoming = next(arrivals, None)
        output = scheduler.schedule()
        allocated += scheduler.kv_cache.num_used_blocks * block_size
        used += sum(request.num_computed_tokens for request in scheduler.live.running)
        preemptions += len(output.preempted_request_ids)
        batch += len(scheduler.live.running)
        num_steps += 1
        if num_steps % 500 == 0:
            check_invariants(scheduler)
        sampled = {s.request_id: SampledTokens((0,)) for s in output.scheduled if s.samples}
        scheduler.update(output, ModelRunnerOutput(sampled, {}))
    print(
        f"{index:,} requests, block size {block_size:3}: KV waste {100 * (allocated - used) / allocated:.2f}%  "
        f"(mean batch {batch / num_steps:.1f}, {num_steps:,} steps, {preemptions} preemptions)"
    )


if __name__ == "__main__":
    main()
