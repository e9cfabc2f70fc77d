import gc
import os
import sys
import time

import torch

import headway.attention.triton_paged as tp
from headway.config import OFFLINE_OPTIONS, EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.lab.bench.offline_bench import SCENARIO_TEMPERATURE, SCENARIOS
from headway.lab.bench.replay import run_round

model = sys.argv[1]
for spec in sys.argv[2:]:
    v = dict((k, int(x)) for k, x in (p.split("=") for p in spec.split(",") if p != "base"))
    tp.MIN_SHARE = v.pop("share", 1)
    tp.TUNE = v
    scen = ["b1", "b64"]
    c = EngineConfig.from_options(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=SCENARIOS["b1"].max_model_len,
        enable_prefix_caching=False,
        **OFFLINE_OPTIONS,
    )
    t = time.time()
    try:
        e = LLMEngine.from_config(c)
        e.warm_up()
        row = []
        for n in scen:
            w = SCENARIOS[n].draw(c.model.seed, e.model_config.vocab_size)
            ts = [run_round(e, w, temperature=SCENARIO_TEMPERATURE).times for _ in range(3)]
            b = min(ts, key=lambda x: x.elapsed_s)
            row.append(f"{n} {1e3 * b.elapsed_s / 256:.3f} ms {b.output_tok_s:,.0f}")
        print(
            os.environ.get("EARLY"),
            os.environ.get("ADDED"),
            spec,
            "|",
            " | ".join(row),
            f"({time.time() - t:.0f}s)",
            flush=True,
        )
        e.close() if hasattr(e, "close") else None
        del e
    except Exception as x:
        print(spec, "failed", repr(x)[-300:], flush=True)
        raise SystemExit
    gc.collect()
    torch.cuda.empty_cache()
