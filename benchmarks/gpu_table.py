"""All scenarios in which the work is there at once, on one engine, as one table; best of three rounds each.

The same as `headway bench latency --scenario b1` and `headway bench throughput --scenario b64|nano|prefill` (a warm-up
round each; the long `nano` is its own warm-up), without loading the model four times. `ms/step` and the floor beside it
are of the steps that decode, without the prompts.

    python benchmarks/gpu_table.py --model qwen3-0.6b
    python benchmarks/gpu_table.py --model llama31-70b --tensor-parallel-size 4 --collectives none --scenarios b64
"""

from __future__ import annotations

import json

from shape_flags import shape_options, shape_parser

from headway.config import COLLECTIVES, OFFLINE_OPTIONS, EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.worker.ceilings import measure_ceilings
from headway.worker.step_costs import planned_costs
from headway_lab.bench.environment import measure_start_up
from headway_lab.bench.floors import work_floor
from headway_lab.bench.offline_bench import SCENARIO_TEMPERATURE, SCENARIOS
from headway_lab.bench.replay import run_round

NO_WARM_UP = ("nano",)


def main() -> None:
    parser = shape_parser(__doc__, model="qwen3-0.6b")
    parser.add_argument("--scenarios", nargs="+", default=["b1", "b64", "prefill", "nano"], choices=tuple(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks")
    parser.add_argument("--collectives", default="auto", choices=COLLECTIVES, help="none: one rank alone")
    parser.add_argument("--output-json", metavar="FILE")
    options = parser.parse_args()

    config = EngineConfig.from_options(
        **shape_options(options),
        max_model_len=SCENARIOS["b1"].max_model_len,
        tensor_parallel_size=options.tensor_parallel_size,
        collectives=options.collectives,
        **OFFLINE_OPTIONS,
    )
    engine = LLMEngine.from_config(config)
    print(f"{options.model}: {measure_start_up(engine)}", flush=True)
    engine.warm_up()
    ceilings = measure_ceilings(engine.plan.device, engine.plan.dtype)
    print(f"ceilings: {ceilings}")
    print(
        f"{'scenario':<10}{'elapsed s':>10}{'ms/token':>10}{'out tok/s':>12}{'in tok/s':>12}{'floor s':>10}"
        f"{'ms/step':>10}{'floor':>8}  rounds, s"
    )
    results = {}
    for name in options.scenarios:
        work = SCENARIOS[name].draw(config.model.seed, engine.model_config.vocab_size)
        for _ in range(name not in NO_WARM_UP):
            run_round(engine, work, temperature=SCENARIO_TEMPERATURE)
        rounds = [run_round(engine, work, temperature=SCENARIO_TEMPERATURE).times for _ in range(options.rounds)]
        best = min(rounds, key=lambda times: times.elapsed_s)
        floor = work_floor(
            work,
            planned_costs(engine.model_config, engine.plan),
            ceilings,
            max_num_seqs=engine.config.scheduler.max_num_seqs,
        )
        per_token_ms = 1e3 * best.elapsed_s / SCENARIOS[name].output_len.high if name in ("b1", "b64") else float("nan")
        print(
            f"{name:<10}{best.elapsed_s:>10.3f}{per_token_ms:>10.3f}{best.output_tok_s:>12,.0f}{best.input_tok_s:>12,.0f}"
            f"{floor.times.elapsed_s:>10.3f}{_ms(best.pace_s)}{_ms(floor.times.pace_s, 8)}  "
            f"{', '.join(f'{times.elapsed_s:.3f}' for times in rounds)}",
            flush=True,
        )
        results[name] = {
            "elapsed_s": [times.elapsed_s for times in rounds],
            "output_tok_s": best.output_tok_s,
            "input_tok_s": best.input_tok_s,
            "floor_s": floor.times.elapsed_s,
            "pace_s": best.pace_s,
            "floor_pace_s": floor.times.pace_s,
        }
    if options.output_json is not None:
        with open(options.output_json, "w") as file:
            json.dump(results, file, indent=2)


def _ms(seconds: float | None, width: int = 10) -> str:
    return f"{'':>{width}}" if seconds is None else f"{1e3 * seconds:>{width}.3f}"


if __name__ == "__main__":
    main()
