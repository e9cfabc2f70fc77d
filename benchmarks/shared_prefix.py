"""What sharing a prefix is worth: the same requests with the prefix cache on and off.

All requests begin with the same tokens (a system prompt, a document) and go on with their own. With the cache the first
computes the common part and the others, who are there at the same time, wait for it and start from it. Every round has
new prompts, so that nothing is found of an earlier one.

    python benchmarks/shared_prefix.py --model llama31-8b
"""

from __future__ import annotations

import argparse
import gc
import random

import torch

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway_lab.bench.offline_bench import SCENARIO_TEMPERATURE
from headway_lab.bench.replay import run_round
from headway_lab.workload.bench_requests import BenchRequest, highest_token_id


def draw(options: argparse.Namespace, seed: int, vocab_size: int) -> list[BenchRequest]:
    rng = random.Random(seed)
    highest = highest_token_id(vocab_size)
    common = [rng.randint(0, highest) for _ in range(options.prefix)]
    return [
        BenchRequest([*common, *(rng.randint(0, highest) for _ in range(options.tail))], options.out)
        for _ in range(options.requests)
    ]


def measure(options: argparse.Namespace, prefix_caching: bool) -> float:
    """Output tokens per second, of the best round."""
    config = EngineConfig.from_options(
        model=options.model,
        load_format="dummy",
        dtype=options.dtype,
        max_model_len=options.prefix + options.tail + options.out,
        enable_prefix_caching=prefix_caching,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    engine = LLMEngine.from_config(config)
    times = []
    for seed in range(options.rounds + 1):  # the first is the warm-up
        work = draw(options, seed, engine.model_config.vocab_size)
        one = run_round(engine, work, temperature=SCENARIO_TEMPERATURE)
        times.append(one.times.elapsed_s)
        cache = engine.core.scheduler.kv_cache.prefix_cache
        hits = "" if cache is None else f", {100 * cache.stats.hit_rate:.1f}% of all prompt tokens found until now"
        print(
            f"  prefix caching {'on' if prefix_caching else 'off'}, round {seed}: {one.times.elapsed_s:.3f} s{hits}",
            flush=True,
        )
    engine.shutdown()
    return options.requests * options.out / min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama31-8b", help="a built-in shape or a config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=4096, help="tokens that all prompts begin with")
    parser.add_argument("--tail", type=int, default=64, help="tokens of each prompt after them")
    parser.add_argument("--out", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rates = {}
    for prefix_caching in (False, True):
        rates[prefix_caching] = measure(options, prefix_caching)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(
        f"{options.model}, {options.requests} requests, {options.prefix} common + {options.tail} own tokens in, "
        f"{options.out} out: {rates[False]:,.0f} out tok/s without the cache, {rates[True]:,.0f} with it, "
        f"{rates[True] / rates[False]:.2f} times as many"
    )


if __name__ == "__main__":
    main()
