"""Time to the first token of a known prompt: computed, from the device, from host memory, from disk after a restart.

    python benchmarks/disk_cache.py --folder FOLDER [--tokens 1900] [--repeat 5]
    python benchmarks/disk_cache.py --folder FOLDER --model llama31-8b --load-format dummy --block-size 64 --tokens 4000

Each prompt takes all blocks of the device, so the next time it comes from further away. After a restart an engine
loads what was used last into host memory; two more lives do not, and read when they are asked: files that the system
has in memory, and that it was told to forget. FOLDER is left as it is found, but for its blocks.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from headway import LLM, SamplingParams
from headway.engine import block_pump

PARAMS = SamplingParams(max_tokens=1, temperature=0)
FIRST = "host memory"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-cache-memory", type=int, default=2**30, help="bytes")
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks; host memory is for each")
    options = parser.parse_args()
    times: dict[str, list[tuple[float, int]]] = {}
    rng = random.Random(time.time_ns())  # not what is there from another run
    vocabulary = range(1000, 30000)
    prompts = [rng.choices(vocabulary, k=options.tokens) for _ in range(options.repeat)]
    load_latest_s = block_pump.LOAD_LATEST_S
    for life in (FIRST, "after a restart", "disk", "disk, cold"):
        if life == "disk, cold":
            _forget(options.folder)
        block_pump.LOAD_LATEST_S = 0.0 if life.startswith("disk") else load_latest_s
        started_s = time.perf_counter()
        llm = _start(options)
        print(f"started in {time.perf_counter() - started_s:.2f} s")
        for length in (options.tokens, options.tokens // 3, options.tokens // 2, options.tokens):
            _ask(llm, rng.choices(vocabulary, k=length))  # kernels are compiled, and what steps cost is learnt
        if life == FIRST:
            for prompt in prompts:
                times.setdefault("computed", []).append(_ask(llm, prompt))
                times.setdefault("device", []).append(_ask(llm, prompt))
        for prompt in prompts:
            times.setdefault(life, []).append(_ask(llm, prompt))
        started_s = time.perf_counter()
        llm.shutdown()
        print(f"ended in {time.perf_counter() - started_s:.2f} s")
        os.sync()  # or the next life would wait for what the system still has to write
    print(f"\n| prefix of {options.tokens} tokens | TTFT, median | range | tokens found |\n|---|--:|--:|--:|")
    for name, found in times.items():
        seconds = [one for one, _ in found]
        spread = f"{min(seconds):.3f} – {max(seconds):.3f}"
        print(f"| {name} | {statistics.median(seconds):.4f} s | {spread} | {found[-1][1]} |")


def _start(options: argparse.Namespace) -> LLM:
    more: dict[str, Any] = {} if options.model is None else {"model": options.model}
    return LLM(
        load_format=options.load_format,
        block_size=options.block_size,
        num_kv_blocks=options.tokens // options.block_size + 2,  # so that another prompt leaves nothing of one
        max_model_len=options.tokens + options.block_size,
        host_cache_memory=options.host_cache_memory,
        disk_cache=str(options.folder),
        tensor_parallel_size=options.tensor_parallel_size,
        **more,
    )


def _ask(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    started_s = time.perf_counter()
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    return time.perf_counter() - started_s, output.num_cached_tokens


def _forget(folder: Path) -> None:
    """Have the system read the files from the disk again."""
    for path in folder.glob("*/*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    main()
