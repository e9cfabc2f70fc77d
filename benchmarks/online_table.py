"""Requests that come over time, on one engine, as a table: the scenario `online` at several speeds, and workload files.

The same as `headway bench throughput --scenario online --trace FILE --speedup X` and `headway bench throughput
--workload FILE`, without loading the model each time. Latencies are P50 / P90 / P99 in milliseconds.

    python benchmarks/online_table.py --model llama31-8b --trace azure_conv.csv --speedups 2.5 4.4
    python benchmarks/online_table.py --model llama31-8b --workloads backlog
"""

from __future__ import annotations

from shape_flags import shape_options, shape_parser

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway_lab.bench.offline_bench import SCENARIO_TEMPERATURE, SCENARIOS
from headway_lab.bench.online_metrics import Distribution, OnlineMetrics
from headway_lab.bench.replay import replay
from headway_lab.workload.workload_file import load_workload

ONLINE = SCENARIOS["online"]


def main() -> None:
    parser = shape_parser(__doc__, model="llama31-8b")
    parser.add_argument("--trace", metavar="CSV", help="arrivals and lengths")
    parser.add_argument("--speedups", nargs="*", type=float, default=[], help="of the trace")
    parser.add_argument("--workloads", nargs="*", default=[], metavar="WORKLOAD")
    options = parser.parse_args()

    config = EngineConfig.from_options(
        **shape_options(options),
        max_model_len=ONLINE.max_model_len,
    )
    engine = LLMEngine.from_config(config)
    engine.warm_up()
    seed, vocab_size = config.model.seed, engine.model_config.vocab_size
    works = {
        f"trace x{speedup:g}": ONLINE.draw(seed, vocab_size, trace=options.trace, speedup=speedup)
        for speedup in options.speedups
    }
    works |= {path: list(load_workload(path).draw(seed=seed, vocab_size=vocab_size)) for path in options.workloads}
    print(f"{'':<24}{'TTFT':>22}{'ITL':>22}{'TPOT':>22}{'out tok/s':>11}{'req/s':>7}{'lost':>6}")
    for name, work in works.items():
        done = replay(engine, work, temperature=SCENARIO_TEMPERATURE)
        metrics = OnlineMetrics.of(done.timelines, done.duration_s)
        shown = "".join(f"{_percentiles(times):>22}" for times in (metrics.ttft, metrics.itl, metrics.tpot))
        tok_s, req_s = (each / metrics.duration_s for each in (metrics.num_output_tokens, metrics.num_completed))
        print(f"{name:<24}{shown}{tok_s:>11,.0f}{req_s:>7.1f}{metrics.num_lost:>6}", flush=True)


def _percentiles(times: Distribution) -> str:
    return " / ".join(f"{times.percentiles[percent]:,.1f}" for percent in (50, 90, 99))


if __name__ == "__main__":
    main()
