"""The running batch as the host knows it: which request is in which row, and which rows a step uses.

A request gets a row when it enters the batch and keeps it until it leaves, so that only changes are sent. This table is
the same for every device; the tokens and block tables themselves are where the model runs (`eager_runner.py`,
`device_rows.py`). A step is a flat batch over the rows, requests with a single new token first:

    scheduled      A: 3 tokens from position 5    B: 1 token from position 9
    rows           [ B A ]       query_start [ 0 1 4 ]       seq_lens [ 10 8 ]       tokens  B9 A5 A6 A7

A `Stage` stores such rows and runs a model's steps over them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from headway.core.scheduler_output import NewRequest, SchedulerOutput
from headway.runner.base import RunnerSettings
from headway.runner.sampler import Int32Array, Int64Array, SamplingRows, Seat, StepDrafts
from headway.sampling_params import Pooling, SamplingParams


@dataclass(frozen=True, slots=True)
class WantedPrompt:
    """A prompt whose logprobs or pooled vector a request asks for."""

    token_ids: tuple[int, ...]
    num_top: int | None
    """How many most likely tokens to report beside each prompt logprob; `None`: no prompt logprobs."""
    pooling: Pooling | None = None
    """How to pool the prompt into a vector; `None`: no vector."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, on the host. Requests with a single new token come first."""

    request_ids: list[str]
    """If drafts are divided, a request with drafts appears several times, with a single new token each time."""
    rows: Int64Array
    num_new: Int64Array
    """Tokens to compute, by request."""
    num_requests: int
    num_single: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start: Int64Array
    """Where each request's tokens begin in the flat batch, followed by the end of the last request's."""
    seq_lens: Int64Array
    sampled: list[int]
    """Indices in `request_ids` of the requests that sample. The `sample_` columns are in this order, with one line for
    each request, or several if it verifies drafts."""
    sample_index: Int64Array
    """The index of the token in the step whose logits each line samples."""
    sample_rows: Int64Array
    sample_positions: Int64Array
    """The position that the new token gets in the request's tokens."""
    drafts: StepDrafts | None = None
    """The drafts, if requests verify some. Each such request has a line for its last token and one for each draft."""
    line_offsets: Int64Array | None = None
    """Set if drafts in flight decide how many tokens requests have. For each of `rows`: how many tokens after the row's
    last one its token is, or -1 if the host knows its position. `seq_lens` are then upper bounds."""
    sample_offsets: Int64Array | None = None
    """As `line_offsets`, for the positions of the sampled lines."""

    @classmethod
    def flat(
        cls,
        rows: Int64Array,
        num_new: Int64Array,
        num_computed: Int64Array,
        *,
        sampled: Int64Array,
        request_ids: Sequence[str] = (),
        sample_index: Int64Array | None = None,
        sample_rows: Int64Array | None = None,
        sample_positions: Int64Array | None = None,
        drafts: StepDrafts | None = None,
        line_offsets: Int64Array | None = None,
        sample_offsets: Int64Array | None = None,
    ) -> StepRows:
        """Build the step from its rows, their new tokens and their tokens before; single tokens come first. Without the
        `sample_` columns, each request in `sampled` has one line."""
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(num_new, out=query_start[1:])
        seq_lens = num_computed + num_new
        return cls(
            request_ids=list(request_ids),
            rows=rows,
            num_new=num_new,
            num_requests=len(rows),
            num_single=int((num_new == 1).sum()),
            num_tokens=int(query_start[-1]),
            max_query_len=int(num_new.max()),
            max_seq_len=int(seq_lens.max()),
            query_start=query_start,
            seq_lens=seq_lens,
            sampled=sampled.tolist(),
            sample_index=query_start[1:][sampled] - 1 if sample_index is None else sample_index,
            sample_rows=rows[sampled] if sample_rows is None else sample_rows,
            sample_positions=seq_lens[sampled] if sample_positions is None else sample_positions,
            drafts=drafts,
            line_offsets=line_offsets,
            sample_offsets=sample_offsets,
        )

    @property
    def is_decode(self) -> bool:
        """Whether every request has a single new token."""
        return self.num_single == self.num_requests

    @property
    def all_sample_in_order(self) -> bool:
        """Whether the i-th sampled line needs line i of the step's hidden states."""
        return len(self.sample_index) == self.num_tokens


class RowTable:
    """Assigns rows to requests: `row_of` maps ids to rows. A device's storage follows this one table."""

    def __init__(self, settings: RunnerSettings, vocab_size: int, *, divides_drafts: bool = False) -> None:
        """With `divides_drafts`, a request that verifies drafts enters a step as several requests that share a row and
        have a single new token each."""
        self.row_of: dict[str, int] = {}
        self.sampling = SamplingRows(settings.max_num_seqs, vocab_size, settings.eos_token_ids)
        self.wanted_prompts: dict[str, WantedPrompt] = {}
        """The prompts of requests in the batch that ask for prompt logprobs or a vector, by request id."""
        self.max_num_seqs = settings.max_num_seqs
        self.max_model_len = settings.max_model_len
        self.max_num_blocks = -(-settings.max_model_len // settings.block_size)
        """The number of entries in a request's block table."""
        self._seed = settings.seed
        self._divides_drafts = divides_drafts
        self._synthetic_acceptance = settings.synthetic_acceptance
        self._random = np.random.default_rng(settings.seed)
        self._had_drafts = False  # whether the previous step had drafts
        self._free_rows = list(range(settings.max_num_seqs - 1, -1, -1))
        self._num_blocks: Int64Array = np.zeros(settings.max_num_seqs, dtype=np.int64)

    def seat(self, requests: Sequence[NewRequest]) -> list[Seat]:
        """Give rows to requests. If any of them is invalid, an error is raised and none gets a row."""
        if len(requests) > len(self._free_rows):
            raise ValueError(f"{len(requests)} requests for {len(self._free_rows)} free rows")
        seats = []
        try:
            for request in requests:
                seats.append(self._seat(request))
        except Exception:
            for seat in seats:
                self.free(seat.request.request_id)
            raise
        return seats

    def _seat(self, request: NewRequest) -> Seat:
        params = request.sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is a {type(params).__name__}")
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens > self.max_model_len or len(request.block_ids) > self.max_num_blocks:
            raise ValueError(
                f"a request of {num_tokens} tokens and {len(request.block_ids)} blocks does not fit into a row of "
                f"{self.max_model_len} and {self.max_num_blocks}"
            )
        seat = Seat(self._free_rows[-1], request, params, _seed_of(self._seed, request.request_id))
        self.sampling.seat(seat)
        self.row_of[request.request_id] = self._free_rows.pop()
        self._num_blocks[seat.row] = 0
        if params.prompt_logprobs is not None or params.pooling is not None:
            wanted = WantedPrompt(request.prompt_token_ids, params.prompt_logprobs, params.pooling)
            self.wanted_prompts[request.request_id] = wanted
        return seat

    def free(self, request_id: str) -> None:
        """Free a request's row, if it has one."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
            self.sampling.clear(row)
            self.wanted_prompts.pop(request_id, None)

    def append_blocks(self, added: Sequence[tuple[str, Sequence[int]]]) -> Int32Array:
        """Record blocks that requests get. Returns where to write them: [n, 3] of (row, place in its table, block)."""
        entries: list[tuple[int, int, int]] = []
        for request_id, block_ids in added:
            row = self.row_of[request_id]
            place = int(self._num_blocks[row])
            entries += [(row, place + i, block) for i, block in enumerate(block_ids)]
            self._num_blocks[row] = place + len(block_ids)
        return np.array(entries, dtype=np.int32).reshape(-1, 3)

    def step(self, output: SchedulerOutput) -> StepRows:
        """The rows of a step. All scheduled requests must be seated."""
        row_of = self.row_of
        table = np.array(
            [(row_of[s.request_id], s.num_tokens, s.num_computed_tokens, s.samples) for s in output.scheduled],
            dtype=np.int64,
        )
        num_drafts = None
        if any(share.drafts for share in output.scheduled):
            num_drafts = np.array([len(share.drafts) for share in output.scheduled], dtype=np.int64)
        is_single = table[:, 1] == (1 if num_drafts is None or not self._divides_drafts else num_drafts + 1)
        order = np.argsort(~is_single, kind="stable")  # single tokens first
        rows, num_new, num_computed, samples = table[order].T
        sampled = np.flatnonzero(samples)
        ends = (num_computed + num_new)[sampled]
        drafts, sample_rows, sample_positions = None, rows[sampled], ends
        sample_index = np.cumsum(num_new)[sampled] - 1
        times = np.ones(len(order), dtype=np.int64)  # how many entries each request has in the step
        if num_drafts is not None:
            drafts = self._drafts(
                [output.scheduled[place].drafts for place in order[sampled].tolist()], sample_rows, ends
            )
            back = drafts.line_offsets - np.repeat(drafts.num_lines - 1, drafts.num_lines)  # from a request's last line
            sample_index = np.repeat(sample_index, drafts.num_lines) + back
            sample_positions = np.repeat(sample_positions, drafts.num_lines) + back
            sample_rows = np.repeat(sample_rows, drafts.num_lines)
            if self._divides_drafts:
                times += num_drafts[order]
        line_offsets = sample_offsets = None
        if self._divides_drafts and (drafts is not None or self._had_drafts):
            follows = (samples > 0) & is_single[order]  # they begin with the row's last token
            line_offsets = np.where(np.repeat(follows, times), _places(times), -1)
            lines = times[sampled]
            sample_offsets = np.where(np.repeat(follows[sampled], lines), _places(lines), -1)
        self._had_drafts = drafts is not None
        if drafts is not None and self._divides_drafts:
            order, rows, num_computed = np.repeat(order, times), np.repeat(rows, times), np.repeat(num_computed, times)
            num_computed += _places(times)
            num_new = np.where(np.repeat(times, times) > 1, 1, np.repeat(num_new, times))
            sampled = (np.cumsum(times) - times)[sampled]
        return StepRows.flat(
            rows,
            num_new,
            num_computed,
            sampled=sampled,
            request_ids=[output.scheduled[place].request_id for place in order.tolist()],
            sample_index=sample_index,
            sample_rows=sample_rows,
            sample_positions=sample_positions,
            drafts=drafts,
            line_offsets=line_offsets,
            sample_offsets=sample_offsets,
        )

    def _drafts(self, tokens: Sequence[Sequence[int]], rows: Int64Array, ends: Int64Array) -> StepDrafts:
        """The drafts of the requests that sample, in these rows. A request's drafts are its last tokens in the step."""
        num_drafts = np.array([len(part) for part in tokens], dtype=np.int64)
        num_accepted = None
        if (acceptance := self._synthetic_acceptance) is not None:
            runs = self._random.geometric(1.0 - acceptance, len(tokens)) - 1
            num_accepted = np.minimum(runs, num_drafts)
        return StepDrafts(
            num_lines=num_drafts + 1,
            rows=np.repeat(rows, num_drafts),
            positions=np.repeat(ends - num_drafts, num_drafts) + _places(num_drafts),
            token_ids=np.fromiter(itertools.chain.from_iterable(tokens), dtype=np.int64, count=int(num_drafts.sum())),
            num_accepted=num_accepted,
        )


StagedStep = TypeVar("StagedStep")


class Stage(Protocol[StagedStep]):
    """Stores the rows of requests and runs steps over them. `StagedStep` is its record of a staged step."""

    def seat(self, seats: Sequence[Seat], blocks: Int32Array) -> None:
        """Write the tokens of requests that enter, and their first blocks: (row, place in its table, block)."""
        ...

    def stage(self, step: StepRows, blocks: Int32Array, *, exact: bool) -> StagedStep:
        """Send a step and the blocks that it adds to the device. With `exact` it runs without padding."""
        ...

    def forward(self, staged: StagedStep) -> Tensor:
        """Run the model. Returns the logits of the sampled lines, in order; extra lines may follow."""
        ...

    def num_padding_tokens(self, staged: StagedStep) -> int:
        """How many tokens the forward pass computes only to fill the batch up to the size of its graph."""
        ...

    def hidden(self, staged: StagedStep) -> Tensor:
        """Run the model on a step staged with `exact`. Returns the hidden states of all its tokens."""
        ...

    def warm_up(self) -> int:
        """Prepare each kind of step; see `Runner.warm_up`."""
        ...

    @property
    def num_prepared(self) -> int:
        """How many steps prepared something (a graph, compiled kernels) for later steps of their shape."""
        ...


def _places(counts: Int64Array) -> Int64Array:
    """0, 1, … within each group, for groups of these sizes."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _seed_of(engine_seed: int, request_id: str) -> int:
    """The seed of a request that gives none. It depends only on the engine's seed and the request's id."""
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
