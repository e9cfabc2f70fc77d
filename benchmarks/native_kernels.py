"""Speed of the CPU kernels, shape by shape, beside torch's own: `python benchmarks/native_kernels.py [part ...]`.

Parts: pool, linear, attention, rowwise, load. Every time is the best of many short runs, since a shared machine can
only make a kernel slower. Default shapes are SmolLM2-135M's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from headway import native
from headway.attention.base import AttentionBatch, Heads
from headway.attention.cpu import CpuAttention
from headway.kv.layer_cache import LayerKVCache
from headway.layers.native_ops import Float32Linear, Int8Linear, NativeOps

LINEAR_SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}


clock = time.perf_counter


def best_seconds(call: Callable[[], object], budget_s: float = 0.15) -> float:
    """Shortest of as many runs as fit in the budget (at least 3)."""
    call()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 3 or (spent < budget_s and runs < 2000):
        start = clock()
        call()
        elapsed = clock() - start
        best, spent, runs = min(best, elapsed), spent + elapsed, runs + 1
    return best


def bench_pool() -> None:
    """Fork-join cost and the overhead of one call from Python."""
    library = native.load()
    cost = min(library.released.hw_fork_join_ns(200) for _ in range(50))
    ops, x, weight = NativeOps(), torch.randn(1, 16), torch.randn(16)
    call = best_seconds(lambda: [ops.norm(x, None, weight, 1e-5) for _ in range(100)]) / 100
    print(f"isa {library.isa}, {library.get_num_threads()} threads")
    print(f"fork-join {cost / 1000:.2f} us; smallest op from Python {call * 1e6:.2f} us (torch.empty included)")


def torch_int8(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object] | None:
    """torch's bare int8 matrix product (no scales), where this build has one for the shape."""
    left, right = torch.randint(-127, 127, x.shape, dtype=torch.int8), torch.zeros(weight.shape, dtype=torch.int8)

    def call() -> object:
        return torch._int_mm(left, right.T)

    try:
        call()
    except RuntimeError:
        return None
    return call


def bench_linear(rows: list[int], *, compare: bool) -> None:
    """GOP/s (two per multiply-add), and GB/s of packed weights."""
    ours = " | ".join(f"{kind + ' us':>9} {'GOP/s':>7} {'GB/s':>6}" for kind in ("int8", "f32"))
    print(f"{'layer':8} {'M':>4} | {ours} | {'torch f32':>9} {'torch i8':>9}  (GOP/s)")
    for name, (out, columns) in LINEAR_SHAPES.items():
        weight = torch.randn(out, columns)
        # Several copies, used in turn, keep the weights out of the cache at small M, as in a real model.
        copies = max(1, 64_000_000 // (weight.numel() * 4))
        int8 = [Int8Linear(weight) for _ in range(copies)]
        float32 = [Float32Linear(weight) for _ in range(copies)]
        for m in rows:
            x, operations = torch.randn(m, columns), 2 * m * out * columns
            times = []
            for layers in (int8, float32):
                turn = iter(layers * 100_000)
                times.append((best_seconds(lambda x=x, turn=turn: next(turn)(x)), layers[0].num_bytes))  # type: ignore[misc]
            line = " | ".join(f"{t * 1e6:9.1f} {operations / t / 1e9:7.1f} {b / t / 1e9:6.1f}" for t, b in times)
            if compare:
                torch_float32 = best_seconds(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))  # type: ignore[misc]
                call = torch_int8(x, weight)
                line += f" | {operations / torch_float32 / 1e9:9.1f}"
                line += f" {operations / best_seconds(call) / 1e9:9.1f}" if call else "         -"
            print(f"{name:8} {m:4} | {line}")


def attention_case(
    lengths: list[tuple[int, int]], dtype: torch.dtype, block_size: int = 16
) -> tuple[CpuAttention, torch.Tensor, float, float]:
    """(new tokens, context) per request -> backend, q, flops and cache bytes of one layer's call."""
    heads, kv_heads, dim = 9, 3, 64
    blocks = [-(-context // block_size) for _, context in lengths]
    cache = LayerKVCache.zeros(sum(blocks), kv_heads, dim, block_size, dtype=dtype)
    backend = CpuAttention([cache], heads)  # before the first touch: it asks for huge pages
    cache.k.normal_()
    cache.v.normal_()
    order, table, at = (
        torch.randperm(sum(blocks), dtype=torch.int32),
        torch.zeros(len(lengths), max(blocks), dtype=torch.int32),
        0,
    )
    for i, count in enumerate(blocks):
        table[i, :count] = order[at : at + count]
        at += count
    tokens = sum(new for new, _ in lengths)
    batch = AttentionBatch(
        num_tokens=tokens,
        num_requests=len(lengths),
        max_query_len=max(new for new, _ in lengths),
        max_seq_len=max(context for _, context in lengths),
        query_start=torch.tensor([0, *torch.tensor([new for new, _ in lengths]).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )
    backend.plan(batch)
    pairs = sum(new * (context - (new - 1) / 2) for new, context in lengths)
    bytes_read = sum(context for _, context in lengths) * 2 * kv_heads * dim * cache.k.element_size()
    return backend, torch.randn(tokens, heads, dim), 4 * heads * dim * pairs, bytes_read


def bench_attention() -> None:
    """One layer's call: decode batches, prompts, a mixture."""
    cases = {
        "decode 1 x 512": [(1, 512)],
        "decode 1 x 8192": [(1, 8192)],
        "decode 32 x 400": [(1, 400)] * 32,
        "prompt 512": [(512, 512)],
        "prompt 2048": [(2048, 2048)],
        "chunk 256 of 4096": [(256, 4096)],
        "mixed": [(1, 100 + 20 * i) for i in range(31)] + [(200, 500)],
    }
    for name, lengths in cases.items():
        for dtype in (torch.float32, torch.float16):
            backend, q, flops, bytes_read = attention_case(lengths, dtype)
            t = best_seconds(lambda backend=backend, q=q: backend.run(0, q))  # type: ignore[misc]
            plan = best_seconds(lambda backend=backend: backend.plan(backend.batch), 0.02)  # type: ignore[misc]
            print(f"{name:18} {str(dtype)[6:]:8} {t * 1e6:10.1f} us {flops / t / 1e9:6.1f} GFLOP/s "
                  f"{bytes_read / t / 1e9:6.1f} GB/s   plan {plan * 1e6:.1f} us")  # fmt: skip


def bench_rowwise() -> None:
    """The small kernels, at one row and at many."""
    ops = NativeOps()
    weight, heads = torch.randn(576), Heads(9, 3, 64, torch.randn(4096, 64), 1e-5)
    cache = LayerKVCache.zeros(200, 3, 64, 16, dtype=torch.float16)
    for rows in (1, 32, 512):
        x, residual, gate_up = torch.randn(rows, 576), torch.randn(rows, 576), torch.randn(rows, 3072)
        qkv, at = torch.randn(rows, 960), torch.arange(rows)
        calls: dict[str, Callable[[], object]] = {
            "norm": lambda x=x, residual=residual: ops.norm(residual, x, weight, 1e-5),  # type: ignore[misc]
            "silu_mul": lambda gate_up=gate_up: ops.silu_mul(gate_up),  # type: ignore[misc]
            "rope_write_kv": lambda qkv=qkv, at=at: ops.rope_write_kv(  # type: ignore[misc]
                qkv, at, at, heads, None, cache
            ),
        }
        print(
            f"T={rows:4}: "
            + "  ".join(f"{name} {best_seconds(call, 0.03) * 1e6:.1f} us" for name, call in calls.items())
        )


def bench_load() -> None:
    """Start-up: packing and GGUF dequantisation, in weights per second."""
    weight = torch.randn(49152, 576)
    raw = torch.randint(0, 255, (weight.numel() // 32 * 20,), dtype=torch.uint8)
    for name, call in {
        "pack_int8": lambda: native.pack_int8(weight),
        "pack_float32": lambda: native.pack_float32(weight),
        "dequantize Q4_1": lambda: native.dequantize("Q4_1", raw, weight.shape),
    }.items():
        t = best_seconds(call)
        print(f"{name:16} {t * 1e3:7.1f} ms for 28.3M weights, {weight.numel() / t / 1e6:7.0f} M/s, "
              f"135M in {135e6 / (weight.numel() / t):.3f} s")  # fmt: skip


def main() -> None:
    """Run the chosen parts (all by default)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=["pool", "linear", "attention", "rowwise", "load"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--threads", type=int, help="with 1, CPU time is measured: steady on a busy machine")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's own kernels")
    options = parser.parse_args()
    if options.threads == 1:
        global clock
        clock = time.thread_time
    if options.threads:
        native.set_num_threads(options.threads)
        torch.set_num_threads(options.threads)
    for part in options.parts:
        print(f"\n== {part}")
        if part == "linear":
            bench_linear(options.rows, compare=not options.no_torch)
        else:
            {"pool": bench_pool, "attention": bench_attention, "rowwise": bench_rowwise, "load": bench_load}[part]()


if __name__ == "__main__":
    main()
