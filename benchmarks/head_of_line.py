"""Short requests behind long prompts: in strict order, and with steps that are shared.

Long prompts come as a Poisson process, or one at the start, and short requests beside them. For each setting one line:
times to the first token of short and long requests, the time between tokens, and tokens per second over all. All
settings run on one loaded model; a warm-up with other prompts comes before each.

    python benchmarks/head_of_line.py                                             # the embedded model, one long prompt
    python benchmarks/head_of_line.py --model llama31-8b --load-format dummy --long-rate 4.5 --short-rate 5 --seconds 30
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.engine.loaded_model import LoadedModel
from headway_lab.bench.replay import Replay, replay
from headway_lab.bench.timelines import percentile
from headway_lab.workload.bench_requests import HIGHEST_TOKEN_ID, BenchRequest

SETTINGS = {
    "strict order": {"short_prompt_share": 0.0, "long_prompt_step_ms": 0.0},
    "steps as long as any": {"long_prompt_step_ms": 0.0},
    "default": {},
}


def draw(options: argparse.Namespace, *, seed: int, vocab_size: int) -> list[BenchRequest]:
    rng = random.Random(seed)
    sizes = [(0.0, options.long_tokens)] if not options.long_rate else _arrivals(rng, options, options.long_rate)
    sizes += [(at_s, rng.randint(*options.short_tokens)) for at_s, _ in _arrivals(rng, options, options.short_rate)]
    return [
        BenchRequest(
            [rng.randint(0, min(HIGHEST_TOKEN_ID, vocab_size - 1)) for _ in range(num_tokens)],
            options.output_tokens,
            arrival_s=at_s,
        )
        for at_s, num_tokens in sorted(sizes)
    ]


def _arrivals(rng: random.Random, options: argparse.Namespace, rate: float) -> list[tuple[float, int]]:
    at_s, arrivals = 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < options.seconds:
        arrivals.append((at_s, options.long_tokens))
    return arrivals


def measure(options: argparse.Namespace, name: str, engine: LLMEngine) -> None:
    vocab_size = engine.model_config.vocab_size
    warm_up, work = (draw(options, seed=seed, vocab_size=vocab_size) for seed in (1, options.seed))
    replay(engine, [one for one in warm_up if one.arrival_s < options.warm_up_s], temperature=0.0)
    print(f"{name:<22}{describe(options, replay(engine, work, temperature=0.0))}", flush=True)


def describe(options: argparse.Namespace, result: Replay) -> str:
    is_long = [timeline.num_prompt_tokens >= options.long_tokens for timeline in result.timelines]
    short = [1e3 * one.ttft_s for one, long in zip(result.timelines, is_long) if not long]
    long = [1e3 * one.ttft_s for one, long in zip(result.timelines, is_long) if long]
    gaps = [1e3 * gap for one in result.timelines for gap in one.itls_s]
    num_tokens = sum(one.num_prompt_tokens + len(one.token_times_s) for one in result.timelines)
    return (
        f"short TTFT {_row(short)}   long TTFT {_row(long)}   ITL {_row(gaps)}   "
        f"{num_tokens / result.duration_s:,.0f} tok/s   {result.num_lost} lost"
    )


def _row(values: Sequence[float]) -> str:
    return "P50 {:,.0f} P99 {:,.0f} max {:,.0f} ms".format(*(percentile(values, p) for p in (50, 99, 100)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--long-tokens", type=int, default=7_000)
    parser.add_argument("--short-tokens", type=int, nargs=2, default=[20, 20], metavar=("LOW", "HIGH"))
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--long-rate", type=float, default=0.0, help="a second; 0: one, at the start")
    parser.add_argument("--short-rate", type=float, default=0.2, help="a second")
    parser.add_argument("--seconds", type=float, default=40.0, help="so long requests come")
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = EngineConfig.from_options(model=options.model, load_format=options.load_format)
    model = LoadedModel(LLMEngine.from_config(config))
    model.engine.warm_up()
    for name in options.settings:
        measure(options, name, model.reschedule(**SETTINGS[name]))
    model.shutdown()


if __name__ == "__main__":
    main()
