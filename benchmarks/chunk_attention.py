"""Attention of few new tokens behind a long known prefix, µs: contexts cut into parts, whole, and their bytes alone.

    python benchmarks/chunk_attention.py [--heads 32 --kv-heads 8]

On an NVIDIA GPU, bfloat16, heads of 128, blocks of 64: layers in a CUDA graph, so many that the cache holds none.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import torch
from quantized_gemm import timed

from headway.attention.triton_paged import NUM_PARTS, TritonPagedAttention
from headway.worker.ceilings import measure_ceilings
from headway_lab.bench.attention_times import AttentionCase, AttentionWork, HeadShape

HEAD_DIM, BLOCK = 128, 64
PAST_CACHE_BYTES, CACHE_BYTES = 250e6, 4e9
WORK = [
    (new, context, requests)
    for requests in (1, 4)
    for new in (8, 32, 64, 128, 256, 512)
    for context in (512, 1000, 4000, 16000, 64000)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    options = parser.parse_args()
    bandwidth = measure_ceilings("cuda", "bfloat16").bandwidth_bytes_s
    print(
        "| requests | new tokens | known | cut, µs | parts | whole | | bytes alone |\n|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for new, context, requests in WORK:
        num_bytes = 4.0 * HEAD_DIM * options.kv_heads * (context + new) * requests
        if num_bytes > CACHE_BYTES:
            continue
        with patch.object(TritonPagedAttention, "_cuts_tiles", lambda _self, _num_tokens: False):
            whole_us, _, expected = attend(new, context, requests, options.heads, options.kv_heads)
        cut_us, num_parts, found = attend(new, context, requests, options.heads, options.kv_heads)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
        floor_us = 1e6 * num_bytes / bandwidth
        columns = [requests, new, f"{context:,}", f"{cut_us:.1f}", num_parts, f"{whole_us:.1f}"]
        columns += [f"{whole_us / cut_us:.2f}", f"{floor_us:.1f}"]
        print(f"| {' | '.join(map(str, columns))} |", flush=True)


def attend(new: int, context: int, requests: int, num_heads: int, num_kv_heads: int) -> tuple[float, int, torch.Tensor]:
    """µs of a layer, most parts of a context, and what comes out of the first."""
    torch.manual_seed(0)
    shape = HeadShape(num_heads, num_kv_heads, HEAD_DIM, "bfloat16", "bfloat16")
    work = AttentionWork(requests, new, context + new)
    case = AttentionCase.of("cuda", shape, work, BLOCK, past_cache_bytes=PAST_CACHE_BYTES)
    case.backend.plan(case.scattered)
    tiles = case.scattered.tiles
    assert tiles is not None
    return timed(case.run, len(case.backend.kv_caches)), int(tiles[:, NUM_PARTS].max()), case.run(0)


if __name__ == "__main__":
    main()
