"""How long the attention kernel takes on contiguous and on scattered blocks of the same cache.

    contiguous    block table 0 1 2 3 4 5 …     a request's blocks lie one behind the other
    scattered     block table 7 2 9 0 5 3 …     as after a long time of requests that come and go

Both run the kernel of the engine on the same memory, in turns, so that a machine that becomes slower does so for both.
Layers are used in rotation, so many that the processor's or the GPU's cache holds none until its next turn.

On CUDA, calls are captured in a graph and timed with events: launched one by one, they would wait for the host.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.attention import AttentionBackend, AttentionBatch


@dataclass(frozen=True)
class HeadShape:
    """The heads of one layer, and the format of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    q_dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, in a plain format."""
        import torch

        return 2 * self.num_kv_heads * self.head_dim * getattr(torch, self.kv_dtype).itemsize


@dataclass(frozen=True)
class AttentionWork:
    """One step's requests, which are all alike."""

    num_requests: int
    num_new: int
    """New tokens of each request: 1 when it decodes."""
    context: int
    """Tokens of each request in the cache, the new ones included."""

    @property
    def num_cached_tokens(self) -> int:
        return self.num_requests * self.context


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    past_cache_bytes: float
    """Together the layers take at least so many bytes."""
    max_rounds: int
    min_rounds: int = 7
    seconds: float = 1.5
    """No further round begins after so many."""
    num_warm_ups: int = 2
    quantile: float = 0.5
    """Which of the sorted times counts. Less than a half where other work on the machine can slow calls down."""
    calls_per_graph: int = 1
    """On CUDA, at least so many calls in a graph, which is timed as a whole."""


@dataclass(frozen=True)
class LayoutTimes:
    """Seconds of one layer's call."""

    contiguous_s: float
    scattered_s: float

    @property
    def ratio(self) -> float:
        return self.scattered_s / self.contiguous_s


def measure_layouts(device: str, shape: HeadShape, work: AttentionWork, block_size: int, effort: Effort) -> LayoutTimes:
    """Time the device's own kernel on both layouts. `ConfigError` for block sizes that the engine does not take, and
    if the device has too little free memory."""
    import torch

    with torch.inference_mode():
        case = AttentionCase.of(device, shape, work, block_size, past_cache_bytes=effort.past_cache_bytes)
        times = _cuda_times(case, effort) if device == "cuda" else _host_times(case, effort)
    contiguous_s, scattered_s = (sorted(own)[int(effort.quantile * (len(own) - 1))] for own in times)
    return LayoutTimes(contiguous_s, scattered_s)


@dataclass(frozen=True)
class AttentionCase:
    """A backend over layers with random keys and values, and one step in two layouts."""

    backend: AttentionBackend
    contiguous: AttentionBatch
    scattered: AttentionBatch
    q: Tensor

    @staticmethod
    def of(
        device: str,
        shape: HeadShape,
        work: AttentionWork,
        block_size: int,
        *,
        past_cache_bytes: float = 0.0,
        backend_name: str | None = None,
    ) -> AttentionCase:
        """Make it. `backend_name`: the device's own kernels if none is given."""
        import torch

        from headway.attention import create_backend
        from headway.config import CacheConfig
        from headway.kv.layer_cache import LayerKVCache

        CacheConfig(block_size=block_size)  # refuses sizes that the engine refuses
        blocks_each = -(-work.context // block_size)
        num_blocks = blocks_each * work.num_requests
        layer_bytes = shape.bytes_per_token * num_blocks * block_size
        num_layers = max(2, math.ceil(past_cache_bytes / layer_bytes))
        _check_room(device, num_layers * layer_bytes)
        caches = [
            LayerKVCache.zeros(
                num_blocks,
                shape.num_kv_heads,
                shape.head_dim,
                block_size,
                dtype=getattr(torch, shape.kv_dtype),
                device=device,
            )
            for _ in range(num_layers)
        ]
        backend = create_backend(
            backend_name or ("triton" if device == "cuda" else "cpu"), caches, shape.num_heads
        )  # before the first touch: on a CPU it asks for large pages
        for cache in caches:
            cache.k.normal_()
            cache.v.normal_()
        in_order = torch.arange(num_blocks, dtype=torch.int32).view(work.num_requests, blocks_each)
        anywhere = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0), dtype=torch.int64)
        q = torch.randn(work.num_requests * work.num_new, shape.num_heads, shape.head_dim)
        return AttentionCase(
            backend,
            _batch(backend, work, in_order, device),
            _batch(backend, work, anywhere.int().view_as(in_order), device),
            q.to(device, getattr(torch, shape.q_dtype)),
        )

    def run(self, layer: int) -> Tensor:
        """Attention of one layer, for the batch that was planned last."""
        return self.backend.run(layer % len(self.backend.kv_caches), self.q)


def _check_room(device: str, num_bytes: int) -> None:
    if device != "cuda":
        return
    import torch

    free = torch.cuda.mem_get_info()[0]
    if num_bytes > 0.9 * free:
        raise ConfigError(
            f"Timing the attention kernel takes {num_bytes / 2**30:.1f} GiB of the GPU's memory, and "
            f"{free / 2**30:.1f} GiB are free: give the engine less with --gpu-memory-utilization."
        )


def _batch(backend: AttentionBackend, work: AttentionWork, table: Tensor, device: str) -> AttentionBatch:
    """The step with this block table, divided on the host for backends that need it."""
    import numpy as np
    import torch

    from headway.attention import AttentionBatch, DividesWork

    num, new = work.num_requests, work.num_new
    lens, totals, rows = np.full(num, new), np.full(num, work.context), np.arange(num)
    parts = tiles = None
    if isinstance(backend, DividesWork):
        if new == 1:
            parts = torch.from_numpy(backend.context_parts(totals, rows)).to(device)
        else:
            tiles = torch.from_numpy(backend.query_tiles(lens, totals, 0, num_tokens=num * new)).to(device)
    return AttentionBatch(
        num_tokens=num * new,
        num_requests=num,
        max_query_len=new,
        max_seq_len=work.context,
        query_start=torch.arange(0, num * new + 1, new, dtype=torch.int32, device=device),
        seq_lens=torch.full((num,), work.context, dtype=torch.int32, device=device),
        block_table=table.contiguous().to(device),
        slot_mapping=torch.full((num * new,), -1, dtype=torch.int64, device=device),  # nothing is written
        rows=torch.arange(num, dtype=torch.int32, device=device),
        num_single=num if new == 1 else 0,
        parts=parts,
        tiles=tiles,
        num_tiles=None if tiles is None else torch.tensor([len(tiles)], dtype=torch.int32).to(device),
    )


def _host_times(case: AttentionCase, effort: Effort) -> tuple[list[float], list[float]]:
    """Seconds of single calls, in both layouts."""
    layers = itertools.count()

    def call(batch: AttentionBatch) -> float:
        case.backend.plan(batch)
        layer = next(layers)
        started_s = time.perf_counter()
        case.run(layer)
        return time.perf_counter() - started_s

    return _in_turns(effort, lambda: call(case.contiguous), lambda: call(case.scattered))


def _cuda_times(case: AttentionCase, effort: Effort) -> tuple[list[float], list[float]]:
    """Seconds of a call, in both layouts: means over the calls of a graph."""
    import torch

    num_layers = len(case.backend.kv_caches)
    num_calls = -(-effort.calls_per_graph // num_layers) * num_layers
    graphs = [_graph_of(case, batch, num_calls) for batch in (case.contiguous, case.scattered)]

    def replay(graph: torch.cuda.CUDAGraph) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / num_calls

    return _in_turns(effort, lambda: replay(graphs[0]), lambda: replay(graphs[1]))


def _graph_of(case: AttentionCase, batch: AttentionBatch, num_calls: int) -> torch.cuda.CUDAGraph:
    import torch

    case.backend.plan(batch)
    case.run(0)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_calls):
            case.run(layer)
    return graph


def _in_turns(
    effort: Effort, first: Callable[[], float], second: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """The results of both in each round. The second goes first in every other one. Some rounds warm up."""
    results: tuple[list[float], list[float]] = ([], [])
    started_s = time.perf_counter()
    for number in range(effort.num_warm_ups + effort.max_rounds):
        is_late = time.perf_counter() - started_s > effort.seconds
        if is_late and number >= effort.num_warm_ups + effort.min_rounds:
            break
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            results[place].append((first, second)[place]())
    return results[0][effort.num_warm_ups :], results[1][effort.num_warm_ups :]
