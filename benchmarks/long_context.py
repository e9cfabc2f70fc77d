"""Long contexts on one engine with dummy weights, beside their floors: generating for 8 requests of 32,000 tokens (the
median time of a step, against the bytes that it has to read), and one prompt of 128,000 (time against its arithmetic,
and memory).

    python benchmarks/long_context.py --model llama31-8b
"""

from __future__ import annotations

import random

import torch
from shape_flags import shape_options, shape_parser

from headway.config import OFFLINE_OPTIONS, EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.worker.ceilings import measure_ceilings
from headway.worker.step_costs import planned_costs
from headway_lab.bench.offline_bench import SCENARIO_TEMPERATURE
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.replay import replay
from headway_lab.workload.bench_requests import LengthRange, draw_work

NUM_DECODES = 8


def main() -> None:
    parser = shape_parser(__doc__, model="llama31-8b")
    parser.add_argument("--decode-len", type=int, default=32_000, help="tokens in the cache of each that generates")
    parser.add_argument("--prompt-len", type=int, default=128_000)
    parser.add_argument("--num-tokens", type=int, default=128, help="that each generates")
    options = parser.parse_args()

    config = EngineConfig.from_options(
        **shape_options(options),
        max_model_len=max(options.decode_len, options.prompt_len) + options.num_tokens,
        **OFFLINE_OPTIONS,
    )
    engine = LLMEngine.from_config(config)
    engine.warm_up()
    plan = engine.plan
    costs = planned_costs(engine.model_config, plan)
    ceilings = measure_ceilings(plan.device, plan.dtype)
    print(f"{options.model}: {ceilings} · {plan.num_tokens:,} tokens of cache")

    def run(num_requests: int, input_len: int, output_len: int) -> OnlineMetrics:
        work = draw_work(
            random.Random(0),
            num_requests,
            input_len=LengthRange.exactly(input_len),
            output_len=LengthRange.exactly(output_len),
            vocab_size=engine.model_config.vocab_size,
        )
        result = replay(engine, work, temperature=SCENARIO_TEMPERATURE)
        if result.num_lost:
            raise SystemExit(f"{result.num_lost} requests were lost: {dict(result.errors)}")
        return OnlineMetrics.of(result.timelines, result.duration_s)

    run(NUM_DECODES, options.decode_len // 16, 16)
    step_ms = run(NUM_DECODES, options.decode_len, options.num_tokens).latencies["itl"].percentiles[50]
    num_cached = NUM_DECODES * (options.decode_len + options.num_tokens // 2)
    floor_ms = (costs.weight_bytes + costs.kv_bytes_per_token * num_cached) / ceilings.bandwidth_bytes_s * 1e3
    print(
        f"decode: {NUM_DECODES} × {options.decode_len:,} tokens: {step_ms:.2f} ms a step, floor {floor_ms:.2f} "
        f"({floor_ms / step_ms:.0%} of the bandwidth)",
        flush=True,
    )
    cuda = torch.cuda if plan.device.startswith("cuda") else None
    seconds = run(1, options.prompt_len, 1).latencies["ttft"].percentiles[50] / 1e3
    floor_s = costs.prompt_flops(options.prompt_len) / ceilings.flops_s
    print(
        f"prompt: {options.prompt_len:,} tokens: {seconds:.2f} s ({options.prompt_len / seconds:,.0f} tokens/s), floor "
        f"{floor_s:.2f} s ({floor_s / seconds:.0%}), {options.prompt_len * costs.kv_bytes_per_token / 2**30:.1f} GiB "
        "of keys and values"
        + ("" if cuda is None else f", {cuda.max_memory_allocated() / 2**30:.1f} GiB taken at most in all")
    )


if __name__ == "__main__":
    main()
