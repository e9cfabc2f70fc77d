"""The ceilings of a device: bytes moved by a copy and flops of a large matmul.

They are measured within a second rather than looked up, so that a share of them means the same on a data-centre GPU and
on two cores of a laptop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Ceilings:
    """The two ceilings of a device."""

    bandwidth_bytes_s: float
    """Bytes read plus bytes written by a copy."""
    flops_s: float
    """Flops of a large square matmul, counted as 2 per multiply-add."""
    matmul_dtype: str = "bfloat16"

    def scaled(self, factor: float) -> Ceilings:
        """Those of a device that is `factor` times as fast."""
        return replace(self, bandwidth_bytes_s=factor * self.bandwidth_bytes_s, flops_s=factor * self.flops_s)

    def __str__(self) -> str:
        rate = f"{self.flops_s / 1e12:,.1f} TFLOP/s" if self.flops_s >= 1e12 else f"{self.flops_s / 1e9:,.1f} GFLOP/s"
        return f"copy {self.bandwidth_bytes_s / 1e9:,.1f} GB/s · {self.matmul_dtype} matmul {rate}"


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a measurement: large enough to reach the ceiling, small enough for a second."""

    copy_bytes: int
    matmul_width: int
    num_runs: int
    """Runs of a measurement, of which the fastest counts."""
    calls_per_run: int
    longest_s: float = 0.1
    """Stop after the run that reaches this time. Two are always made."""


_CUDA_SIZES = _Sizes(copy_bytes=2**30, matmul_width=8192, num_runs=5, calls_per_run=5)
_CPU_SIZES = _Sizes(copy_bytes=2**26, matmul_width=1024, num_runs=6, calls_per_run=1)


def measure_ceilings(device_name: str, dtype_name: str) -> Ceilings:
    """Measure the ceilings. The matmul is in the number format in which the model multiplies prompts, the plan's
    `dtype`. On a CPU all quantised weights are multiplied with 8-bit activations by Headway's own kernel."""
    import torch

    device = torch.device(device_name)
    sizes = _CUDA_SIZES if device.type == "cuda" else _CPU_SIZES
    weights, _, activations = dtype_name.rpartition(" weights, ")
    dtype_name = "float32" if device.type == "cpu" else activations.removesuffix(" activations")
    is_fp8 = weights.lower().startswith("fp8") and device.type == "cuda" and dtype_name != "float32"
    with torch.inference_mode():
        bandwidth = _copy_bandwidth(device, sizes)
        if is_fp8:
            dtype_name, flops = "fp8", _fp8_flops(device, sizes)
        elif weights and device.type == "cpu":
            dtype_name, flops = "int8", _int8_flops(sizes)
        else:
            flops = _matmul_flops(device, getattr(torch, dtype_name), sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(bandwidth, flops, dtype_name)


def _copy_bandwidth(device: torch.device, sizes: _Sizes) -> float:
    import torch

    num_bytes = sizes.copy_bytes
    if device.type == "cuda":
        # The engine has taken most of the memory.
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), device, sizes)


def _matmul_flops(device: torch.device, dtype: torch.dtype, sizes: _Sizes) -> float:
    import torch

    width = sizes.matmul_width
    # Random numbers: a matmul of zeros draws less power and runs faster than any real one.
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * width**3 / _best_seconds(lambda: torch.matmul(left, right, out=out), device, sizes)


def _fp8_flops(device: torch.device, sizes: _Sizes) -> float:
    import torch

    width = sizes.matmul_width
    left, right = (torch.randn(width, width, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns = torch.ones(width, 1, device=device), torch.ones(1, width, device=device)

    def multiply() -> object:
        return torch._scaled_mm(left, right.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2.0 * width**3 / _best_seconds(multiply, device, sizes)


def _int8_flops(sizes: _Sizes) -> float:
    import torch

    from headway.layers.native_ops import Int8Linear

    width = sizes.matmul_width
    linear, rows = Int8Linear(torch.randn(width, width)), torch.randn(width, width)
    return 2.0 * width**3 / _best_seconds(lambda: linear(rows), torch.device("cpu"), sizes)


def _best_seconds(call: Callable[[], object], device: torch.device, sizes: _Sizes) -> float:
    """Seconds of one call, in the fastest of several runs."""
    _wait_for(device)
    call()
    best, began_s = float("inf"), time.perf_counter()
    for number in range(sizes.num_runs):
        _wait_for(device)
        started_s = time.perf_counter()
        if number >= 2 and started_s - began_s > sizes.longest_s:
            break
        for _ in range(sizes.calls_per_run):
            call()
        _wait_for(device)
        best = min(best, (time.perf_counter() - started_s) / sizes.calls_per_run)
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
