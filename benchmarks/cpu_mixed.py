"""A mixed load on the CPU: many requests of very different lengths at once, then one request alone.

The workload is a JSON list of {"prompt_ids": [...], "max_tokens": n}; decoding is greedy and ignores end-of-sequence.
Prints one JSON line: output_tok_s and total_tok_s of the mixed load, batch1_tok_s of a single decode, start_s (process
start to first token), peak_rss_mb, and a checksum of the tokens so that runs can be compared.

    python benchmarks/cpu_mixed.py WORKLOAD.json [--dtype float32] [--model PATH] [--rounds 3]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import time


def process_start_s() -> float:
    """Seconds since this process was started, on the wall clock."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = float(stat.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--model", default=None, help="default: the embedded model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="runs of the mixed load; the best and all are printed")
    parser.add_argument("--single-tokens", type=int, default=256, help="tokens of the single decode")
    options = parser.parse_args()

    from headway import LLM, SamplingParams, __version__

    llm = LLM(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        device="cpu",
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=False,  # every round has the same prompts
    )
    llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=1))
    start_s = process_start_s()

    with open(options.workload) as file:
        requests = json.load(file)
    prompts = [request["prompt_ids"] for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
    num_input = sum(map(len, prompts))
    num_output = sum(request["max_tokens"] for request in requests)

    seconds, single_rates = [], []
    for _ in range(options.rounds):
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == num_output
        single_rates.append(single_decode(llm, prompts[0][:32], options.single_tokens))
    tokens = json.dumps([output.outputs[0].token_ids for output in outputs]).encode()
    print(
        json.dumps(
            {
                "engine": "headway",
                "version": __version__,
                "settings": f"dtype={options.dtype} max_num_seqs={options.max_num_seqs} "
                f"max_num_batched_tokens={options.max_num_batched_tokens}",
                "output_tok_s": round(num_output / min(seconds), 1),
                "total_tok_s": round((num_input + num_output) / min(seconds), 1),
                "all_output_tok_s": [round(num_output / s, 1) for s in seconds],
                "batch1_tok_s": round(max(single_rates), 1),
                "start_s": round(start_s, 2),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "tokens_sha": hashlib.sha256(tokens).hexdigest()[:12],
            }
        )
    )


def single_decode(llm, prompt: list[int], num_tokens: int) -> float:
    """Tokens per second of one request alone, from its first token to its last."""
    from headway import SamplingParams

    times = [
        time.perf_counter()
        for _ in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    ]
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    main()
