"""The least time that a piece of work can take on a machine, from the model's shape and the machine's ceilings.

Generating is bound by bytes, reading prompts by arithmetic. So

    floor     = decode + prefill
    decode    = Σ over decode steps (W + K · c) / bandwidth
    prefill   = Σ over requests (2·P·L  +  2·q·L·(L+1)·layers  +  2·V·H) / rate

with

    W   bytes of all weights that a step multiplies with: every layer and the output projection, not the embedding table
        (of which a step reads one row per token)
    K   bytes of keys and values of one token, over all layers
    c   tokens in the cache of all running requests at that step
    L   prompt length;  P  weights in the layers;  q  query width (heads × head size);  V, H  vocabulary and hidden size

The three terms of a prompt are its linear layers, its causal attention (query·key and weight·value, 2 flops per
multiply-add, half of the square), and the output projection of its last token.

The steps are counted out: as many requests as may run at once start together; the first token of each comes out of its
prompt, each later one takes a step; when one has ended the next takes its place. A request with o tokens of output thus
takes part in o - 1 steps, and at the i-th of them has L + i tokens in the cache.

The ceilings, bytes moved by a copy and flops of a large matmul, are measured within a second rather than looked up, so
that a floor means the same on a data-centre GPU and on two cores of a laptop.

The floor ignores that the arithmetic of prompts could overlap with the bytes of a decode step, and that a cache may be
too small for all requests. It assumes perfect overlap of everything else.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.models.decoder_config import DecoderConfig
from headway_lab.bench.timelines import RequestTimeline, RoundTimes
from headway_lab.workload.bench_requests import BenchRequest, Work

if TYPE_CHECKING:
    import torch

    from headway.worker.memory_plan import MemoryPlan


@dataclass(frozen=True)
class Ceilings:
    """The two ceilings of a device."""

    bandwidth_bytes_s: float
    """Bytes read plus bytes written by a copy."""
    flops_s: float
    """Flops of a large square matmul, counted as 2 per multiply-add."""
    matmul_dtype: str = "bfloat16"

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


_CUDA_SIZES = _Sizes(copy_bytes=2**30, matmul_width=8192, num_runs=5, calls_per_run=5)
_CPU_SIZES = _Sizes(copy_bytes=2**26, matmul_width=1024, num_runs=6, calls_per_run=1)


def measure_ceilings(device_name: str, dtype_name: str) -> Ceilings:
    """Measure the ceilings. The matmul is in the number format in which the model multiplies prompts, the plan's
    `dtype`."""
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


def _best_seconds(call: Callable[[], object], device: torch.device, sizes: _Sizes) -> float:
    """Seconds of one call, in the fastest of several runs."""
    _wait_for(device)
    call()
    best = float("inf")
    for _ in range(sizes.num_runs):
        _wait_for(device)
        started_s = time.perf_counter()
        for _ in range(sizes.calls_per_run):
            call()
        _wait_for(device)
        best = min(best, (time.perf_counter() - started_s) / sizes.calls_per_run)
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class ModelCosts:
    """What one model costs per step and per token: `W`, `K` and the terms of a prompt, as in the formula above."""

    weight_bytes: float
    kv_bytes_per_token: float
    linear_flops_per_token: float
    attention_flops_per_pair: float
    """Flops for one query and one key, over all layers and heads."""
    output_flops: float
    """The output projection of one token."""

    def prompt_flops(self, length: int) -> float:
        """The arithmetic of a whole prompt."""
        pairs = length * (length + 1) / 2
        return self.linear_flops_per_token * length + self.attention_flops_per_pair * pairs + self.output_flops


def model_costs(model: DecoderConfig, *, bytes_per_weight: float, kv_bytes_per_token: float) -> ModelCosts:
    """The costs of a model. Norms and biases, less than a thousandth of the weights, are left out."""
    layer = model.hidden_size * (model.qkv_size + model.q_size + 3 * model.intermediate_size)
    layers = layer * model.num_layers
    output = model.vocab_size * model.hidden_size
    return ModelCosts(
        weight_bytes=(layers + output) * bytes_per_weight,
        kv_bytes_per_token=kv_bytes_per_token,
        linear_flops_per_token=2.0 * layers,
        attention_flops_per_pair=4.0 * model.q_size * model.num_layers,
        output_flops=2.0 * output,
    )


def planned_costs(model: DecoderConfig, plan: MemoryPlan) -> ModelCosts:
    """The costs of a model, or of one rank's part, in the number formats that an engine runs it with."""
    costs = model_costs(model, bytes_per_weight=1.0, kv_bytes_per_token=plan.bytes_per_block / plan.block_size)
    return replace(
        costs,
        weight_bytes=plan.step_weight_bytes,
        linear_flops_per_token=costs.linear_flops_per_token / plan.num_ranks,
        attention_flops_per_pair=costs.attention_flops_per_pair / plan.num_ranks,
        output_flops=costs.output_flops / plan.num_ranks,
    )


@dataclass(frozen=True)
class DecodeSteps:
    """The decode steps of some work, and the sum over them of the tokens in the cache."""

    num_steps: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Floor:
    """The least time of a piece of work."""

    decode_s: float
    prefill_s: float
    times: RoundTimes
    """The floor in the form of a measured round."""


def work_floor(work: Work, costs: ModelCosts, ceilings: Ceilings, *, max_num_seqs: int) -> Floor:
    """The floor of work whose requests are all there at the start."""
    steps = count_decode_steps(work, max_num_seqs)
    num_bytes = costs.weight_bytes * steps.num_steps + costs.kv_bytes_per_token * steps.num_cached_tokens
    decode_s = num_bytes / ceilings.bandwidth_bytes_s
    prefill_s = sum(_prompt_flops(request, costs) for request in work) / ceilings.flops_s
    times = RoundTimes.of(
        work, elapsed_s=decode_s + prefill_s, pace_s=decode_s / steps.num_steps if steps.num_steps else None
    )
    return Floor(decode_s, prefill_s, times)


def count_decode_steps(work: Work, max_num_seqs: int) -> DecodeSteps:
    """Count the work's steps without a model; stretches in which no request begins or ends are summed at once."""
    waiting = [
        (request.num_prompt_tokens, request.num_output_tokens - 1)
        for request in reversed(work)
        for _ in range(request.num_choices)
        if request.num_output_tokens > 1
    ]
    running: list[tuple[int, int]] = []  # (step after which it ends, tokens in the cache then)
    now = num_cached = total = 0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            prompt, num_steps = waiting.pop()
            heapq.heappush(running, (now + num_steps, prompt + num_steps))
            num_cached += prompt
        num_steps = running[0][0] - now
        total += num_steps * num_cached + len(running) * num_steps * (num_steps + 1) // 2
        num_cached += len(running) * num_steps
        now += num_steps
        while running and running[0][0] == now:
            num_cached -= heapq.heappop(running)[1]
    return DecodeSteps(now, total)


def timeline_alone(request: BenchRequest, costs: ModelCosts, ceilings: Ceilings) -> RequestTimeline:
    """When the tokens of a request would come if it had the machine to itself: no load can be faster.

    Its first token takes the arithmetic of the prompt or one read of the weights, whichever is longer.
    """
    weights_s = costs.weight_bytes / ceilings.bandwidth_bytes_s
    kv_s = costs.kv_bytes_per_token / ceilings.bandwidth_bytes_s
    now = request.arrival_s + max(weights_s, costs.prompt_flops(request.num_prompt_tokens) / ceilings.flops_s)
    times = [now]
    for num_cached in range(request.num_prompt_tokens + 1, request.num_prompt_tokens + request.num_output_tokens):
        now += weights_s + kv_s * num_cached
        times.append(now)
    return RequestTimeline(request.arrival_s, request.num_prompt_tokens, request.num_output_tokens, times)


def _prompt_flops(request: BenchRequest, costs: ModelCosts) -> float:
    """A prompt is computed once for each of its choices."""
    return costs.prompt_flops(request.num_prompt_tokens) * request.num_choices
