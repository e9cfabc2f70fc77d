"""From era to era on the same kernels: static, dynamic and continuous batching, with memory reserved or paged.

The work is that of a well-known comparison (Anyscale, 2023): prompts of 512 random tokens, all there at once, answers
of exponentially distributed length with mean 128, drawn again above 1,536. Every mode gets the same KV memory. Whoever
reserves memory reserves room for the longest request there can be, since nobody knows how long an answer gets.

    python benchmarks/eras.py --requests 48 --kv-tokens 16384                          # the embedded model
    python benchmarks/eras.py --model llama31-8b --requests 1000 --kv-tokens 131072    # random weights, on a GPU

Printed are (prompt + output) tokens per second, the ratio to static batching, the mean number of requests in the
batch, and how much of the reserved KV memory was empty, over the steps until nobody waits any more and over all steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.engine.loaded_model import LoadedModel
from headway.engine.step_report import EngineStep
from headway.loader.builtin_shapes import BUILTIN_SHAPES
from headway_lab.bench.replay import run_round
from headway_lab.workload.bench_requests import BenchRequest, highest_token_id

PROMPT_TOKENS, MEAN_OUTPUT, MAX_OUTPUT = 512, 128, 1536
MODES: dict[str, dict[str, Any]] = {
    "static, reserved": {"batching": "static", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    "dynamic, reserved": {"batching": "dynamic", "kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    "continuous, reserved, whole prompts": {"kv_allocation": "contiguous-max", "prefill_mode": "prefill-first"},
    "continuous, paged, whole prompts": {"prefill_mode": "prefill-first"},
    "continuous, paged, chunked": {},
}
PUBLISHED = {
    "continuous, paged, chunked": "published: 23 times static (vLLM, OPT-13B, A100 40 GB); waste < 4%",
    "continuous, reserved, whole prompts": "published: 8 times static (continuous batching without paging)",
    "static, reserved": "published: 60 to 80% of KV memory wasted",
}


def draw(num_requests: int, vocab_size: int, *, seed: int = 0) -> list[BenchRequest]:
    rng = random.Random(seed)
    highest = highest_token_id(vocab_size)

    def output_len() -> int:
        while (length := round(rng.expovariate(1 / MEAN_OUTPUT))) > MAX_OUTPUT:
            pass
        return max(length, 1)

    return [
        BenchRequest([rng.randint(0, highest) for _ in range(PROMPT_TOKENS)], output_len()) for _ in range(num_requests)
    ]


@dataclass
class Watch:
    """The engine's step, and what the batch was like after it was planned."""

    engine: LLMEngine
    waste: list[float] = field(default_factory=list)
    waste_while_some_wait: list[float] = field(default_factory=list)
    num_in_batch: list[int] = field(default_factory=list)

    def step(self) -> EngineStep:
        scheduler = self.engine.core.scheduler
        if (waste := scheduler.kv_waste) is not None:
            self.waste.append(waste)
            if scheduler.live.waiting:
                self.waste_while_some_wait.append(waste)
            self.num_in_batch.append(len(scheduler.in_batch))
        return self.engine.step()


def load(options: argparse.Namespace) -> LLMEngine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block_size = EngineConfig().resolve(device).cache.block_size
    is_shape = options.model in BUILTIN_SHAPES or str(options.model).endswith(".json")
    config = EngineConfig.from_options(
        model=options.model,
        max_model_len=PROMPT_TOKENS + MAX_OUTPUT,
        num_kv_blocks=options.kv_tokens // block_size,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
        **({"load_format": "dummy", "dtype": options.dtype} if is_shape else {}),
    )
    return LLMEngine.from_config(config)


def measure(engine: LLMEngine, num_requests: int) -> tuple[float, Watch]:
    run_round(engine, draw(2, engine.model_config.vocab_size, seed=1), temperature=0.0)
    watch = Watch(engine)
    work = draw(num_requests, engine.model_config.vocab_size)
    times = run_round(engine, work, temperature=0.0, step=watch.step).times
    return times.total_tok_s, watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a built-in shape, a folder or a file; default: the embedded model")
    parser.add_argument("--dtype", default="bfloat16", help="of random weights")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    options = parser.parse_args()
    print(
        f"{options.requests} requests of {PROMPT_TOKENS} tokens, answers of {MEAN_OUTPUT} on average, up to "
        f"{MAX_OUTPUT}; KV memory for {options.kv_tokens:,} tokens"
    )
    print(f"{'mode':<38}{'tok/s':>9}{'ratio':>8}{'in batch':>10}{'waste':>9}{'at load':>9}")
    base, model = None, LoadedModel(load(options))
    for name in options.modes:
        rate, watch = measure(model.reschedule(**MODES[name]), options.requests)
        base = base or rate
        at_load = statistics.fmean(watch.waste_while_some_wait or [float("nan")])
        print(
            f"{name:<38}{rate:>9,.0f}{rate / base:>7.2f}x{statistics.fmean(watch.num_in_batch):>10.1f}"
            f"{statistics.fmean(watch.waste):>9.1%}{at_load:>9.1%}  {PUBLISHED.get(name, '')}",
            flush=True,
        )
    model.shutdown()


if __name__ == "__main__":
    main()
