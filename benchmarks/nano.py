"""The `nano` scenario: 256 requests at once, prompts and outputs of 100 to 1,024 random tokens, temperature 0.6.

Random weights of a real shape; end-of-sequence is ignored and nothing is detokenised, so the work is the same for every
engine. Prints output tokens per second and checks that every request got exactly its tokens.

    python benchmarks/nano.py --model qwen3-0.6b --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import random
import time

from headway import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a built-in shape or a config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    options = parser.parse_args()

    started = time.perf_counter()
    llm = LLM(
        options.model,
        load_format="dummy",
        dtype=options.dtype,
        max_model_len=4096,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    loaded_s = time.perf_counter() - started
    print(llm.engine.plan)

    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(options.num_requests)
    ]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(100, 1024), detokenize=False)
        for _ in range(options.num_requests)
    ]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_output == sum(p.max_tokens or 0 for p in params)
    print(
        json.dumps(
            {
                "model": options.model,
                "dtype": options.dtype,
                "num_input_tokens": sum(map(len, prompts)),
                "num_output_tokens": num_output,
                "elapsed_s": round(elapsed_s, 2),
                "output_tok_s": round(num_output / elapsed_s, 1),
                "load_s": round(loaded_s, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
