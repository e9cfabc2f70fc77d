"""Attention of few new tokens behind a long known prefix, µs: contexts cut into parts, whole, and their bytes alone.

    python benchmarks/chunk_attention.py [--heads 32 --kv-heads 8]

On an NVIDIA GPU, bfloat16, heads of 128, blocks of 64: layers in a CUDA graph, so many that the cache holds none.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import numpy as np
import torch
from quantized_gemm import timed

from headway.attention.base import AttentionBatch
from headway.attention.triton_paged import NUM_PARTS, TritonPagedAttention
from headway.kv.layer_cache import LayerKVCache
from headway.worker.ceilings import measure_ceilings

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
    total = context + new
    blocks_each = -(-total // BLOCK)
    num_layers = int(max(2, PAST_CACHE_BYTES // (4 * HEAD_DIM * num_kv_heads * total * requests)))
    torch.manual_seed(0)
    caches = []
    for _ in range(num_layers):
        cache = LayerKVCache.zeros(
            blocks_each * requests, num_kv_heads, HEAD_DIM, BLOCK, dtype=torch.bfloat16, device="cuda"
        )
        cache.k.normal_()
        cache.v.normal_()
        caches.append(cache)
    backend = TritonPagedAttention(caches, num_heads)
    lens, totals = np.full(requests, new), np.full(requests, total)
    tiles = backend.query_tiles(lens, totals, 0, num_tokens=new * requests)
    table = torch.randperm(blocks_each * requests, device="cuda").int().view(requests, blocks_each)
    backend.plan(
        AttentionBatch(
            num_tokens=new * requests,
            num_requests=requests,
            max_query_len=new,
            max_seq_len=total,
            query_start=torch.arange(0, new * requests + 1, new, dtype=torch.int32, device="cuda"),
            seq_lens=torch.full((requests,), total, dtype=torch.int32, device="cuda"),
            block_table=table,
            slot_mapping=torch.full((new * requests,), -1, dtype=torch.int32, device="cuda"),
            rows=torch.arange(requests, dtype=torch.int32, device="cuda"),
            num_single=0,
            tiles=torch.from_numpy(tiles).cuda(),
        )
    )
    q = torch.randn(new * requests, num_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    return timed(lambda layer: backend.run(layer, q), num_layers), int(tiles[:, NUM_PARTS].max()), backend.run(0, q)


if __name__ == "__main__":
    main()
