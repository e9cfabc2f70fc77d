"""The GPU runner: a step is staged with one small copy, queued, and replayed as a CUDA graph.

Nothing waits for the device. A graph replays fixed kernels on fixed addresses, so there is one graph per step shape.
Sizes form a ladder, and a step is padded up to the next rung; a step of some two hundred kernels becomes one launch.
A step so long that its launches overlap with the previous step runs without a graph. Under the Triton interpreter the
same code runs on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.attention import AttentionBatch, DividesWork
from headway.attention.base import MAX_FUSED_REQUESTS
from headway.models.decoder import Decoder
from headway.runner.base import PagedModel, RunnerSettings
from headway.runner.device_rows import DeviceRows, DeviceStep
from headway.runner.draft_model import DraftModel
from headway.runner.rows import RowTable, StepRows
from headway.runner.sampler import Int32Array, Sampler, Seat
from headway.runner.step_runner import StepRunner
from headway.runner.triton_sampling import TritonSampling
from headway.transfer.host_blocks import HostBlocks

# A layer's kernels are launched in 0.3 to 0.8 ms and computed at some 600 TFLOP/s. With more multiplications per layer
# than this a step takes at least twice as long to compute as to launch, so that the host is back in time for the tokens
# of the step before, and padding would cost more than a graph saves.
_LAUNCH_BOUND_FLOPS = 4.5e11


def create_graphed_runner(
    model: PagedModel,
    settings: RunnerSettings,
    *,
    draft: PagedModel | None = None,
    host_blocks: HostBlocks | None = None,
) -> StepRunner[DeviceStep]:
    """Build a runner whose steps are queued on the device. With a draft model, each step waits for the one before."""
    rows = RowTable(settings, model.decoder.config.vocab_size, divides_drafts=True)
    stage = GraphedStage(model, settings, looks_up=draft is None)
    columns = stage.rows.columns
    kernels = TritonSampling(
        rows.sampling,
        token_rows=stage.rows.token_rows,
        lengths=stage.rows.lengths,
        sample_rows=columns["sample_rows"],
        sample_positions=columns["sample_positions"],
    )
    sampler = Sampler(rows.sampling, kernels)
    drafter = None
    if draft is not None:
        drafts = GraphedStage(draft, dataclasses.replace(settings, max_num_lines=None), shared=stage.rows)
        columns = drafts.rows.columns
        guesses = kernels.reading(sample_rows=columns["sample_rows"], sample_positions=columns["sample_positions"])
        drafter = DraftModel(draft, settings, stage=drafts, sampler=Sampler(rows.sampling, guesses))
    return StepRunner(
        model,
        settings,
        rows=rows,
        stage=stage,
        sampler=sampler,
        drafter=drafter,
        host_blocks=host_blocks,
        verifies_ahead=stage.divides_work and draft is None,
    )


class GraphedStage:
    """Rows of tokens and block tables on the device, and the graphs that read them: a `Stage`."""

    def __init__(
        self,
        model: PagedModel,
        settings: RunnerSettings,
        *,
        looks_up: bool = True,
        shared: DeviceRows | None = None,
    ) -> None:
        """`looks_up` is as in `DeviceRows`; `shared` is the stage whose rows this one shares."""
        decoder, attention = model
        max_num_seqs, max_num_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
        max_num_lines = settings.max_num_lines or max_num_seqs
        self._decoder = decoder
        self._attention = attention
        self._division = attention if isinstance(attention, DividesWork) else None
        self.rows = DeviceRows(
            max_num_seqs=max_num_seqs,
            max_num_lines=max_num_lines,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            max_num_tokens=max(max_num_tokens, max_num_lines),
            device=settings.device,
            division=self._division,
            looks_up=looks_up,
            shared=shared,
        )
        self._logits = torch.empty(
            max_num_lines, decoder.config.vocab_size, dtype=decoder.embedding.dtype, device=settings.device
        )
        self._captures_all = settings.graphs == "all"
        self._graphs: StepGraphs | None = None
        if settings.graphs != "off" and self._division is not None:
            self._graphs = StepGraphs(settings.device)
        self._max_num_lines = max_num_lines
        self._drafts = settings.max_num_lines is not None
        self._decode_rungs = decode_rungs(max_num_lines)
        self._token_rungs = token_rungs(min(max_num_tokens, _launch_bound_tokens(decoder)))
        self._sample_rungs = sample_rungs(max_num_lines)

    @property
    def divides_work(self) -> bool:
        """Whether attention reads the division of its work on the device."""
        return self._division is not None

    def seat(self, seats: Sequence[Seat], blocks: Int32Array) -> None:
        """Write the tokens of requests that enter, and their first blocks."""
        self.rows.seat(seats, blocks)

    def stage(self, step: StepRows, blocks: Int32Array, *, exact: bool) -> DeviceStep:
        """Send a step to the device, padded if it will run as a graph."""
        num_tokens = step.num_tokens if exact else self.padded(step.num_tokens, is_decode=step.is_decode)
        return self.rows.stage(step, blocks, num_padded_tokens=num_tokens)

    def padded(self, num_tokens: int, *, is_decode: bool) -> int:
        """How many tokens a step is padded to: the next rung if it will run as a graph."""
        if self._graphs is None:
            return num_tokens
        rung = rung_above(self._decode_rungs if is_decode else self._token_rungs, num_tokens)
        return num_tokens if rung is None else rung

    def forward(self, staged: DeviceStep) -> Tensor:
        """Logits of the requests that sample, in their order."""
        step, num_tokens, num_samples = staged.rows, staged.num_padded_tokens, len(staged.rows.sample_index)
        sample_index = self.rows.columns["sample_index"]
        if self._graphs is not None and step.is_decode:
            has_drafts = step.line_offsets is not None and num_tokens <= MAX_FUSED_REQUESTS
            self._graphs.run(StepShape(num_tokens, num_tokens, has_chunks=False, has_drafts=has_drafts), self.run_shape)
            logits = self._logits[: step.num_requests]
            return logits if step.all_sample_in_order else logits.index_select(0, sample_index[:num_samples])
        if self._graphs is not None and num_tokens in self._token_rungs:
            num_rows = rung_above(self._sample_rungs, num_samples)
            assert num_rows is not None
            self._graphs.run(StepShape(num_tokens, num_rows, has_chunks=True), self.run_shape)
            return self._logits[:num_samples]
        hidden = self._run(staged, sample_index[:num_samples])
        if not num_samples:
            return self._logits[:0]
        return self._decoder.logits(hidden, out=self._logits[:num_samples])

    def num_padding_tokens(self, staged: DeviceStep) -> int:
        """How many tokens fill the step up to its rung."""
        return staged.num_padded_tokens - staged.rows.num_tokens

    def hidden(self, staged: DeviceStep) -> Tensor:
        """Hidden states of all tokens."""
        return self._run(staged, None)

    def warm_up(self) -> int:
        """Capture the graphs of all shapes, so that no step waits for its own. Called only while no step is in flight.

        Returns the number of shapes; 0 if nothing can be captured, or if shapes are captured when they are first used.
        """
        if not self._captures_all or self._graphs is None or not self._graphs.can_capture:
            return 0
        self.rows.stage_nothing()
        shapes = self.shapes()
        for shape in shapes:
            self._graphs.prepare(shape, self.run_shape)
        return len(shapes)

    @property
    def num_prepared(self) -> int:
        """How many times a step was a first run of its shape or captured a graph."""
        return 0 if self._graphs is None else self._graphs.num_prepared

    def shapes(self) -> list[StepShape]:
        """All step shapes, the largest first, so that the smaller ones reuse its memory."""
        found = [StepShape(num_tokens, num_tokens, has_chunks=False) for num_tokens in self._decode_rungs]
        if self._drafts:
            sizes = [num_tokens for num_tokens in self._decode_rungs if 1 < num_tokens <= MAX_FUSED_REQUESTS]
            found += [StepShape(num_tokens, num_tokens, has_chunks=False, has_drafts=True) for num_tokens in sizes]
        for num_tokens in self._token_rungs:
            fewer = 0
            for num_rows in self._sample_rungs:
                if fewer < num_tokens:  # no request without a token
                    found.append(StepShape(num_tokens, num_rows, has_chunks=True))
                fewer = num_rows
        return sorted(found, reverse=True)

    def _run(self, staged: DeviceStep, wanted_rows: Tensor | None) -> Tensor:
        """Run a step without a graph."""
        step = staged.rows
        self.rows.gather(step.num_requests, step.max_query_len)
        return self._forward(
            step.num_tokens,
            step.num_requests,
            wanted_rows,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            num_single=step.num_single,
            num_parts=staged.num_parts,
            num_tiles=staged.num_tiles,
            has_drafts=step.line_offsets is not None,
        )

    def run_shape(self, shape: StepShape) -> None:
        """Run the staged step at its shape's limits: read the columns, write `self._logits`."""
        num_tokens, num_samples, has_chunks, has_drafts = shape
        max_requests = min(num_tokens, self._max_num_lines)
        assert self._division is not None
        self.rows.gather(max_requests + 1, num_tokens)  # one more than can take part, for the padding
        hidden = self._forward(
            num_tokens,
            max_requests + has_chunks,  # with chunks there is one that has several tokens, whatever their number
            self.rows.columns["sample_index"][:num_samples] if has_chunks else None,
            max_query_len=num_tokens if has_chunks else 1,
            max_seq_len=self.rows.max_model_len,
            num_single=max_requests,
            num_parts=self._division.max_parts(max_requests),
            num_tiles=self._division.max_tiles(num_tokens, max_requests) if has_chunks else 0,
            has_drafts=has_drafts,
        )
        self._decoder.logits(hidden, out=self._logits[:num_samples])

    def _forward(
        self,
        num_tokens: int,
        num_requests: int,
        wanted_rows: Tensor | None,
        *,
        max_query_len: int,
        max_seq_len: int,
        num_single: int,
        num_parts: int,
        num_tiles: int,
        has_drafts: bool,
    ) -> Tensor:
        rows, columns = self.rows, self.rows.columns
        batch = AttentionBatch(
            num_tokens=num_tokens,
            num_requests=num_requests,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start=columns["query_start"][: num_requests + 1],
            seq_lens=columns["seq_lens"][:num_requests],
            block_table=rows.block_table,
            slot_mapping=rows.slots[:num_tokens],
            rows=columns["rows"][:num_requests],
            num_single=num_single,
            parts=rows.parts(num_parts) if num_parts else None,
            tiles=rows.tiles(num_tiles) if num_tiles else None,
            num_tiles=columns["counts"][1:2] if num_tiles else None,
            rows_are_shared=has_drafts,
        )
        self._attention.plan(batch)
        return self._decoder.forward(
            rows.token_ids[:num_tokens], rows.positions[:num_tokens], self._attention, wanted_rows
        )


def _launch_bound_tokens(decoder: Decoder) -> int:
    layer = decoder.layers[0]
    num_weights = sum(p.in_features * p.out_features for p in layer.linears)
    return max(64, int(_LAUNCH_BOUND_FLOPS / num_weights))


# --------------------------------------------------------------------------------------------------------------- graphs


class StepShape(NamedTuple):
    """The shape of a step: each has a graph of its own."""

    num_tokens: int
    num_samples: int
    """Rows whose logits are computed."""
    has_chunks: bool
    """Whether any request has several new tokens. If none has, every row is sampled."""
    has_drafts: bool = False
    """Whether single tokens may share a request, or be at positions that the host does not know. Set only for steps
    small enough for that to matter."""


def decode_rungs(max_num_lines: int) -> list[int]:
    """Batch sizes that get a graph: finely spaced where padding would cost most, coarser above."""
    return _up_to(max_num_lines, [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_lines, 32)])


def token_rungs(max_num_tokens: int) -> list[int]:
    """Numbers of tokens that get a graph, for steps with prefill chunks."""
    return _up_to(
        max_num_tokens,
        [*range(32, 512, 32), *range(512, 1024, 64), *range(1024, 2048, 128), *range(2048, max_num_tokens, 256)],
    )


def sample_rungs(max_num_lines: int) -> list[int]:
    """Numbers of sampled rows that get a graph, for steps with prefill chunks. They are few: each multiplies the number
    of graphs, and extra rows cost little while reading the weights takes longer than computing with them."""
    return _up_to(max_num_lines, [64, 256])


def rung_above(rungs: Sequence[int], size: int) -> int | None:
    """The smallest rung that is large enough, or `None`."""
    place = bisect.bisect_left(rungs, size)
    return rungs[place] if place < len(rungs) else None


RunStep = Callable[[StepShape], None]


class StepGraphs:
    """The graphs of one runner. They hold no reference to it, so its memory is freed as soon as it is dropped.

    The first step of a shape runs without a graph, which also compiles its kernels; the second is captured and
    replayed. So graphs can be made when they are needed, or all at once (`prepare`) before requests wait for them. They
    share one pool of working memory, since no two ever run at once. On a CPU, where the kernels are interpreted,
    nothing is captured, and every step runs as the first one does.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_prepared = 0
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, shape: StepShape, step: RunStep) -> None:
        """Run `step(shape)`, or replay its graph. It must run the same operations on the same memory every time."""
        graph = self._graphs.get(shape)
        if graph is None:
            self.num_prepared += self.can_capture
            if shape not in self._seen or self._pool is None:
                self._seen.add(shape)
                step(shape)
                return
            graph = self._graphs[shape] = self._capture(shape, step)
        graph.replay()

    @property
    def can_capture(self) -> bool:
        """Whether the device can capture and replay graphs."""
        return self._pool is not None

    def prepare(self, shape: StepShape, step: RunStep) -> None:
        """Run and capture the shape, as if it had been used twice."""
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
