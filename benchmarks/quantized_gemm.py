"""Which launch is fastest for matmuls with quantised weights, by shape and number of rows: what
`layers/quantized_gemm.py` and `layers/quantized_linear.py` choose by. On an NVIDIA GPU.

    python benchmarks/quantized_gemm.py                            every kind, the layers of an 8B and of a 0.6B model
    python benchmarks/quantized_gemm.py --kinds int4 --rows 1 64   a part of it

Weights are taken in turn, so that the cache never holds them; times are of launches in a CUDA graph. `bf16` is cuBLAS.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from headway.layers import quantized_gemm as gemm
from headway.layers.quantized_weight import FP8, quantise
from headway.layers.skinny_gemm import one_row

SHAPES = {
    "8b": [(6144, 4096, "norm"), (4096, 4096, "add"), (28672, 4096, "swiglu"), (4096, 14336, "add")],
    "0.6b": [(4096, 1024, "norm"), (1024, 2048, "add"), (6144, 1024, "swiglu"), (1024, 3072, "add")],
}
PAST_CACHE_BYTES = 250e6
ONE_ROW_BYTES = [
    (4, 1024, 2, 3), (4, 1024, 4, 2), (4, 2048, 4, 2), (8, 512, 2, 3), (8, 1024, 4, 2), (2, 2048, 2, 3),
    (2, 1024, 1, 3),
    (4, 1024, 1, 3), (4, 512, 1, 4), (4, 512, 2, 3), (1, 2048, 2, 2), (1, 1024, 1, 2), (8, 512, 2, 4), (8, 256, 1, 4),
    (8, 512, 4, 3), (4, 512, 2, 4), (16, 256, 2, 3),
]  # fmt: skip
# (rows, outputs, inputs, warps, stages) of a program; rows 0: as many as there are
CODES = [
    (0, 64, 128, 4, 6), (0, 64, 256, 4, 4), (0, 128, 128, 8, 5), (0, 128, 256, 8, 3), (0, 32, 256, 4, 4),
    (0, 32, 128, 4, 6),
]  # fmt: skip
MORE_CODES = [
    (128, 128, 128, 8, 4), (64, 128, 128, 4, 4), (128, 64, 128, 4, 4), (64, 64, 128, 4, 6), (128, 64, 256, 4, 3),
    (128, 128, 128, 4, 4), (256, 64, 128, 8, 4), (256, 128, 128, 8, 3), (64, 64, 256, 4, 4),
]  # fmt: skip
WORDS = [(0, 64, 0, 4, 3), (0, 128, 0, 8, 3), (0, 64, 0, 4, 4), (0, 64, 0, 8, 3), (0, 32, 0, 4, 4)]
MORE_WORDS = [(128, 64, 0, 4, 3), (128, 128, 0, 8, 2), (64, 128, 0, 8, 3), (128, 64, 0, 8, 3), (128, 128, 0, 8, 3)]


def timed(run: Callable[[int], Any], calls: int, rounds: int = 5) -> float:
    """µs of one of `calls` launches in a graph."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def with_splits(blocks: list[tuple[int, ...]], num_outputs: int, rows: int) -> list[tuple[int, ...]]:
    splits = (1,) if num_outputs > 8192 or rows > 64 else (1, 2, 4, 8)
    chosen = []
    for (block_m, block_n, block_k, warps, stages), split in itertools.product(blocks, splits):
        block_m = block_m or max(16, 1 << (rows - 1).bit_length())
        if rows > 64 or 60 <= -(-num_outputs // block_n) * split <= 600:
            chosen.append((block_m, block_n, block_k, split, warps, stages))
    return chosen


def jobs(options: argparse.Namespace) -> list[tuple[str, int, int, str, int]]:
    return [
        (kind, num_outputs, num_inputs, form, rows)
        for model in options.models
        for num_outputs, num_inputs, form in SHAPES[model]
        for kind in options.kinds
        for rows in options.rows
    ]


@functools.cache
def weights(kind: str, num_outputs: int, num_inputs: int, copies: int) -> list[gemm.PackedCodes]:
    made = []
    for _ in range(copies):
        floats = torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16) * 0.02
        made.append(gemm.pack(quantise(floats, kind), torch.bfloat16))
    return made


def runs(kind: str, num_outputs: int, num_inputs: int, form: str, rows: int, copies: int) -> dict[Any, Callable]:
    """By the launch's choice: what to time."""
    own = weights(kind, num_outputs, num_inputs, copies)
    x = torch.randn(rows, num_inputs, device="cuda").to(torch.bfloat16)
    norm = torch.ones(num_inputs, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(rows, num_outputs, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(residual)
    found: dict[Any, Callable] = {}
    if rows == 1:
        extra: dict[str, Any] = {
            "norm": {"norm": norm, "eps": 1e-5, "out": out},
            "add": {"residual": residual},
            "swiglu": {"norm": norm, "eps": 1e-5, "swiglu": True, "out": out[:, : num_outputs // 2]},
        }[form]
        if kind != "int4":
            for blocks in ONE_ROW_BYTES:
                found["one", blocks] = lambda i, b=blocks: one_row(x, own[i % copies], None, blocks=b, **extra)
    if kind == "int4":
        more: dict[str, Any] = {"out": out}
        if rows <= 64 and form == "add":
            more = {"residual": residual, "next_norm": residual[0]}
        for blocks in with_splits(WORDS if rows <= 64 else MORE_WORDS, num_outputs, rows):
            found["floats", blocks] = lambda i, b=blocks: gemm.multiply_floats(
                x, own[i % copies], None, blocks=b, **more
            )
    elif rows > 1:
        codes, scales = gemm.quantise_rows(x, own[0].codes.dtype)
        for blocks in with_splits(CODES if rows <= 64 else MORE_CODES, num_outputs, rows):
            found["codes", blocks] = lambda i, b=blocks: gemm.multiply_codes(
                codes, scales, own[i % copies], None, out, blocks=b
            )
        if kind == "fp8" and rows >= 16:
            found["library",] = lambda i: torch._scaled_mm(
                codes, own[i % copies].codes.t(), scale_a=scales[:, None], scale_b=own[i % copies].scales[None, :],
                out_dtype=torch.bfloat16, use_fast_accum=True,
            )  # fmt: skip
    return found


def compile_part(arguments: tuple[argparse.Namespace, int, int]) -> None:
    options, part, parts = arguments
    mine = [job for index, job in enumerate(jobs(options)) if index % parts == part]
    for job in mine:
        for run in runs(*job, 1).values():
            try:
                run(0)
            except Exception as error:  # reported when it is timed
                print(job, repr(error)[:100])
        weights.cache_clear()


def around() -> None:
    """The kernels beside the matmuls."""
    for rows in (64, 8192):
        wide = torch.randn(rows, 28672, device="cuda").to(torch.bfloat16)
        narrow = torch.randn(rows, 4096, device="cuda").to(torch.bfloat16)
        norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
        calls = {
            "norm to codes": lambda i, n=narrow, w=norm: gemm.quantise_rows(None, FP8, residual=n, norm=w, eps=1e-5),
            "to codes": lambda i, n=narrow: gemm.quantise_rows(n, FP8),
            "gate to codes": lambda i, w=wide: gemm.quantise_rows(w, FP8, silu=True),
        }
        print(rows, "rows:", ", ".join(f"{name} {timed(run, 20):.1f} us" for name, run in calls.items()), flush=True)
    for kind in ("fp8", "int4"):
        weight = weights(kind, 28672, 4096, 2)
        elapsed = timed(lambda i, w=weight: gemm.dequantise(w[i % 2], torch.bfloat16), 6)
        print(f"dequantise {kind} 28672x4096: {elapsed:.1f} us", flush=True)
    weights.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["fp8", "int4"], choices=("fp8", "int8", "int4"))
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128, 256])
    parser.add_argument("--limit-s", type=float, default=500.0)
    parser.add_argument("--shown", type=int, default=4, help="choices to print of each")
    options = parser.parse_args()
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compile_part, [(options, part, 12) for part in range(12)])
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    around()
    last = None
    for job in jobs(options):
        kind, num_outputs, num_inputs, form, rows = job
        if time.monotonic() - begin > options.limit_s:
            print("out of time")
            break
        copies = int(PAST_CACHE_BYTES / (num_outputs * num_inputs * (0.5 if kind == "int4" else 1))) + 2
        if last != (kind, num_outputs, num_inputs):
            weights.cache_clear()
            last = (kind, num_outputs, num_inputs)
        results = []
        for name, run in runs(*job, copies).items():
            try:
                results.append((timed(run, min(2 * copies, 60)), name))
            except Exception as error:
                print(job, name, repr(error)[:150], flush=True)
        if rows > 1:
            floats = [
                torch.randn(num_outputs, num_inputs, device="cuda").to(torch.bfloat16) for _ in range(copies // 2 + 1)
            ]
            x = torch.randn(rows, num_inputs, device="cuda").to(torch.bfloat16)
            results.append((timed(lambda i, x=x, w=floats: F.linear(x, w[i % len(w)]), min(2 * copies, 60)), "bf16"))
        results.sort(key=lambda result: result[0])
        bf16 = [elapsed for elapsed, name in results if name == "bf16"]
        shown = " | ".join(f"{elapsed:.1f} {name}" for elapsed, name in results[: options.shown])
        library = [elapsed for elapsed, name in results if name[0] == "library"]
        print(
            f"{kind} {num_outputs}x{num_inputs} {form} rows {rows}: {shown}"
            + (f" ; bf16 {bf16[0]:.1f}" if bf16 else "")
            + (f" ; library {library[0]:.1f}" if library else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
