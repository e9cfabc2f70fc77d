"""Steps as CUDA graphs: a step of some two hundred kernels becomes one launch.

A graph replays fixed kernels on fixed addresses, so there is one per shape of a step, over a ladder of sizes; a step is
padded up to the next rung. The first step of a shape runs as it is, which also compiles what is not compiled yet, the
second is captured and replayed. So graphs can be made when they are needed and cost nothing at start-up, or all at once
(`prepare`) before anybody waits for them. They share one pool of working memory, since no two ever run at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class StepShape(NamedTuple):
    """What a graph is made for."""

    num_tokens: int
    num_samples: int
    """Rows whose logits are computed."""
    has_chunks: bool
    """Whether requests with several new tokens take part. Without any, all rows are sampled from."""


def decode_rungs(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: fine where padding would cost most, coarser above."""
    return _up_to(max_num_seqs, [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)])


def token_rungs(max_num_tokens: int) -> list[int]:
    """Numbers of tokens, for steps with chunks of prompts."""
    return _up_to(
        max_num_tokens,
        [*range(32, 512, 32), *range(512, 1024, 64), *range(1024, 2048, 128), *range(2048, max_num_tokens, 256)],
    )


def sample_rungs(max_num_seqs: int) -> list[int]:
    """Numbers of rows to sample from in a step with chunks: few, since each multiplies the graphs, and some rows more
    cost little, as long as reading the weights takes longer than computing with them."""
    return _up_to(max_num_seqs, [64, 256])


def rung_above(rungs: Sequence[int], size: int) -> int | None:
    """The smallest rung that is large enough, or `None`."""
    place = bisect.bisect_left(rungs, size)
    return rungs[place] if place < len(rungs) else None


RunStep = Callable[[StepShape], None]


class StepGraphs:
    """The graphs of one runner, which they do not hold in turn: when it is dropped, its memory is free at once.

    On a CPU, where the kernels are interpreted, there is nothing to capture, and every step runs as the first one does.
    """

    def __init__(self, device: torch.device) -> None:
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, shape: StepShape, step: RunStep) -> None:
        """Run `step(shape)`, which must do the same to the same memory every time, or replay it."""
        graph = self._graphs.get(shape)
        if graph is None:
            if shape not in self._seen or self._pool is None:
                self._seen.add(shape)
                step(shape)
                return
            graph = self._graphs[shape] = self._capture(shape, step)
        graph.replay()

    @property
    def can_capture(self) -> bool:
        """Whether there is a device that replays."""
        return self._pool is not None

    def prepare(self, shape: StepShape, step: RunStep) -> None:
        """As if the shape had come up twice."""
        while self.can_capture and shape not in self._graphs:
            self.run(shape, step)

    def _capture(self, shape: StepShape, step: RunStep) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads (a tokenizer's, a profiler's) may touch CUDA meanwhile; only this one must not.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step(shape)
        return graph


def _up_to(most: int, rungs: Sequence[int]) -> list[int]:
    return [*(rung for rung in rungs if rung < most), most]
