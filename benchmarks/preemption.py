"""Traffic that does not fit: the `online` scenario in a small KV cache, for each way to bring preempted requests back.

All modes use one loaded model, with a host tier that is empty at the start of each. The warm-up is the beginning of the
same trace with other prompts, so that nothing of the measured replay is in any cache.

    python benchmarks/preemption.py --model llama31-8b --trace azure_conv_first2000.csv --kv-tokens 65536
"""

from __future__ import annotations

import argparse
import json

import torch

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.engine.loaded_model import LoadedModel
from headway_lab.bench.offline_bench import SCENARIO_TEMPERATURE, SCENARIOS
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.replay import replay

SCENARIO = SCENARIOS["online"]
NUM_WARM_UP = 100


def load(options: argparse.Namespace) -> LLMEngine:
    block_size = EngineConfig().resolve("cuda" if torch.cuda.is_available() else "cpu").cache.block_size
    config = EngineConfig.from_options(
        model=options.model,
        load_format="dummy",
        dtype=options.dtype,
        max_model_len=SCENARIO.max_model_len,
        num_kv_blocks=options.kv_tokens // block_size,
        host_cache_memory=options.host_cache_memory * 2**30 or None,
    )
    return LLMEngine.from_config(config)


def measure(options: argparse.Namespace, engine: LLMEngine) -> OnlineMetrics:
    config, mode = engine.config, engine.config.scheduler.preemption_mode
    vocab_size = engine.model_config.vocab_size
    warm_up, work = (
        SCENARIO.draw(seed, vocab_size, trace=options.trace, speedup=options.speedup) for seed in (1, config.model.seed)
    )
    replay(engine, warm_up[:NUM_WARM_UP], temperature=SCENARIO_TEMPERATURE)
    result = replay(engine, work[: options.num_requests], temperature=SCENARIO_TEMPERATURE)
    metrics = OnlineMetrics.of(result.timelines, result.duration_s)
    tiers = engine.core.scheduler.kv_cache.tiers
    stats = None if tiers is None else tiers.host.stats
    moved = "" if stats is None else f", {stats.num_moved_out_blocks} blocks out, {stats.num_moved_in_blocks} in"
    most = max(timeline.num_preemptions for timeline in result.timelines)
    print(
        f"{mode:<10} TTFT {_row(metrics, 'ttft')} | ITL {_row(metrics, 'itl')} | E2E {_row(metrics, 'e2el')} | "
        f"{metrics.num_preemptions} preemptions (at most {most} of one request){moved}, {metrics.num_lost} lost, "
        f"{metrics.output_tok_s:,.0f} tok/s"
        + (f", a block comes back in {1e6 * engine.plan.restore_block_s:.0f} us" if tiers is not None else ""),
        flush=True,
    )
    return metrics


def _row(metrics: OnlineMetrics, name: str) -> str:
    of = metrics.latencies[name]
    return "P50 {:.1f} P90 {:.1f} P99 {:.1f} max {:.0f} ms".format(*(of.percentiles[p] for p in (50, 90, 99)), of.max)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama31-8b", help="a built-in shape or a config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trace", required=True, help="a CSV file with arrival_s, input_tokens, output_tokens")
    parser.add_argument("--speedup", type=float, default=2.5, help="arrival times are divided by this")
    parser.add_argument("--num-requests", type=int, default=SCENARIO.num_requests)
    parser.add_argument("--kv-tokens", type=int, default=65_536)
    parser.add_argument("--host-cache-memory", type=int, default=16, metavar="GIB")
    parser.add_argument("--modes", nargs="+", default=["recompute", "swap", "auto"])
    parser.add_argument("--output-json", metavar="FILE")
    options = parser.parse_args()
    results, model = {}, LoadedModel(load(options))
    for mode in options.modes:
        results[mode] = measure(options, model.reschedule(preemption_mode=mode)).as_json()
    model.shutdown()
    if options.output_json:
        with open(options.output_json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
