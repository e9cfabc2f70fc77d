"""Rows, block tables and a step's columns on the device, against lists. Without a GPU through Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.triton_device import DEVICE  # isort: split

from headway.attention import DividesWork
from headway.attention.base import NO_REQUEST, NUM_PART_COLUMNS
from headway.core.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput
from headway.runner.base import RunnerSettings
from headway.runner.device_rows import DeviceRows, DeviceStep
from headway.runner.rows import RowTable, StepRows
from headway.sampling_params import SamplingParams

BLOCK_SIZE = 4


class OneEach:
    """A division of work: a part for each context, a tile for each chunk, and what it was asked."""

    def __init__(self) -> None:
        self.asked_for_parts: list[tuple[list[int], list[int]]] = []
        self.asked_for_tiles: list[tuple[list[int], list[int], int, int]] = []

    def context_parts(self, seq_lens: np.ndarray, rows: np.ndarray, *, alone: bool = False) -> np.ndarray:
        self.asked_for_parts.append((seq_lens.tolist(), rows.tolist()))
        parts = np.zeros((len(rows), NUM_PART_COLUMNS), dtype=np.int32)
        parts[:, 0], parts[:, 1], parts[:, 4] = np.arange(len(rows)), rows, seq_lens
        return parts

    def max_parts(self, num_requests: int) -> int:
        return num_requests + 2

    def query_tiles(
        self, query_lens: np.ndarray, seq_lens: np.ndarray, first_request: int, *, num_tokens: int
    ) -> np.ndarray:
        self.asked_for_tiles.append((query_lens.tolist(), seq_lens.tolist(), first_request, num_tokens))
        tiles = np.zeros((len(query_lens) - first_request, NUM_PART_COLUMNS), dtype=np.int32)
        tiles[:, 0], tiles[:, 1] = np.arange(first_request, len(query_lens)), 100 + query_lens[first_request:]
        return tiles

    def max_tiles(self, num_tokens: int, max_num_requests: int) -> int:
        return max_num_requests


class Rows:
    """The table of rows and its storage on the device, as a runner has them."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 5,
        max_model_len: int = 40,
        block_size: int = BLOCK_SIZE,
        division: DividesWork | None = None,
    ) -> None:
        max_num_tokens = max(24, max_model_len)
        settings = RunnerSettings(DEVICE, max_num_seqs, max_num_tokens, max_model_len, block_size)
        self.table = RowTable(settings, vocab_size=1000)
        self.device = DeviceRows(
            max_num_seqs=max_num_seqs,
            max_num_lines=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            max_num_tokens=max_num_tokens,
            device=DEVICE,
            division=division or OneEach(),
        )

    @property
    def row_of(self) -> dict[str, int]:
        return self.table.row_of

    def add(self, requests: list[NewRequest]) -> list[int]:
        seats = self.table.seat(requests)
        self.device.seat(seats, self.table.append_blocks([(r.request_id, r.block_ids) for r in requests]))
        return [seat.row for seat in seats]

    def stage(self, output: SchedulerOutput, *, padded: Callable[[int], int] = int) -> DeviceStep:
        step = self.table.step(output)
        blocks = self.table.append_blocks([(s.request_id, s.new_block_ids) for s in output.scheduled])
        return self.device.stage(step, blocks, num_padded_tokens=padded(step.num_tokens))


def new(name: str, prompt: list[int], output: tuple[int, ...] = ()) -> NewRequest:
    return NewRequest(name, tuple(prompt), output, SamplingParams())


def share(
    name: str, num_tokens: int, num_computed: int, blocks: tuple[int, ...] = (), *, samples: bool = True
) -> ScheduledRequest:
    return ScheduledRequest(name, num_tokens, num_computed, blocks, samples)


def plan(*scheduled: ScheduledRequest) -> SchedulerOutput:
    return SchedulerOutput(0, (), scheduled, (), (), sum(s.num_tokens for s in scheduled))


def padded_to(size: int) -> Callable[[int], int]:
    return lambda num_tokens: size


def column(rows: Rows, name: str, count: int) -> list[int]:
    return rows.device.columns[name][:count].tolist()


def gathered(rows: Rows, step: StepRows, num_tokens: int | None = None) -> list[tuple[int, int, int]]:
    """(id, position, slot) of each token of the step, padding included where there is any."""
    num_tokens = step.num_tokens if num_tokens is None else num_tokens
    device = rows.device
    device.gather(len(device.token_rows) + 1, max(step.max_query_len, num_tokens))
    parts = (device.token_ids, device.positions, device.slots)
    return list(zip(*(part[:num_tokens].tolist() for part in parts), strict=True))


# ------------------------------------------------------------------------------------------------------------- rows


def test_long_prompts_are_written_and_read_in_several_tiles() -> None:
    rows = Rows(max_num_seqs=2, max_model_len=2100, block_size=64)
    prompt = [(7 * i) % 1000 for i in range(2050)]
    rows.add([new("short", [1, 2]), new("long", prompt)])
    blocks = tuple(range(40, 40 - 33, -1))
    step = rows.stage(plan(share("long", 2050, 0, blocks))).rows
    assert gathered(rows, step) == [(token, i, blocks[i // 64] * 64 + i % 64) for i, token in enumerate(prompt)]


# ----------------------------------------------------------------------------------------------------------- columns


def seated(lengths: Mapping[str, int], **options: Any) -> Rows:
    rows = Rows(**options)
    rows.add([new(name, [ord(name)] * length) for name, length in lengths.items()])
    return rows


def test_the_columns_on_the_device() -> None:
    rows = seated({"a": 3, "b": 6, "c": 9, "d": 5})
    output = plan(
        share("a", 3, 0, (0,), samples=False),
        share("b", 1, 5, (1, 2)),
        share("c", 1, 8, (3, 4, 5)),
    )
    step = rows.stage(output).rows
    assert step.request_ids == ["b", "c", "a"], "single tokens come first"
    assert (step.num_single, step.num_tokens, step.max_query_len, step.max_seq_len) == (2, 5, 3, 9)
    row_of = rows.row_of
    assert column(rows, "counts", 2) == [3, 1]
    assert column(rows, "rows", 3) == [row_of["b"], row_of["c"], row_of["a"]]
    assert column(rows, "query_start", 4) == [0, 1, 2, 5]
    assert column(rows, "seq_lens", 3) == [6, 9, 3]
    assert column(rows, "sample_index", 5) == [0, 1, 0, 0, 0], "a graph may read more of them than there are"
    assert column(rows, "sample_rows", 2) == [row_of["b"], row_of["c"]]
    assert column(rows, "sample_positions", 2) == [6, 9]
    assert rows.device.tiles(1)[:, :2].tolist() == [[2, 103]]
    assert rows.device.parts(2)[:, [0, 1, 4]].tolist() == [[0, row_of["b"], 6], [1, row_of["c"], 9]]


def test_a_step_of_single_tokens_has_no_tiles_and_all_may_sample_in_order() -> None:
    division = OneEach()
    rows = seated({"a": 3, "b": 6}, division=division)
    step = rows.stage(plan(share("a", 1, 2, (0,)), share("b", 1, 5, (1, 2))), padded=padded_to(2))
    assert step.rows.is_decode and step.rows.all_sample_in_order
    assert column(rows, "counts", 2) == [2, 0], "without padding, where the step is full"
    assert step.num_parts == 2 and not division.asked_for_tiles
    step = rows.stage(plan(share("a", 1, 1, samples=False), share("b", 1, 5))).rows
    assert step.is_decode and not step.all_sample_in_order


def test_work_is_divided_by_the_lengths_of_the_step() -> None:
    division = OneEach()
    rows = seated({"a": 8, "b": 6, "c": 9}, division=division)
    output = plan(share("a", 8, 0, (0, 1)), share("b", 1, 5, (2, 3)), share("c", 2, 7, (4, 5, 6)))
    step = rows.stage(output)
    assert division.asked_for_parts == [([6], [rows.row_of["b"]])]
    assert division.asked_for_tiles == [([1, 8, 2], [6, 8, 9], 1, 11)]
    assert (step.num_parts, step.num_tiles) == (1, 2)
    assert rows.device.tiles(2)[:, :2].tolist() == [[1, 108], [2, 102]]
    assert rows.stage(plan(share("a", 4, 4), share("c", 2, 7))).num_parts == 0
    assert len(division.asked_for_parts) == 1, "a step of chunks has none"


def test_room_for_more_parts_belongs_to_nobody() -> None:
    rows = seated({"a": 3, "b": 6, "c": 7}, max_num_seqs=3)
    for _ in range(4):  # so that the list holds something, in each of the host's copies
        rows.stage(plan(*(share(name, 1, 2) for name in "abc")))
    rows.stage(plan(share("b", 1, 2)))
    assert rows.device.parts(5)[:, 0].tolist() == [0, *[NO_REQUEST] * 4]


# ----------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("chunks", [False, True])
def test_padding_is_one_more_request_without_a_row(chunks: bool) -> None:
    rows = seated({"a": 3, "b": 6, "c": 7, "d": 4}, max_num_seqs=4)
    for _ in range(4):  # so that the columns hold something, in each of the host's copies
        rows.stage(plan(*(share(name, 1, 2) for name in "abcd")))
    output = plan(share("a", 1, 2), share("b", 3 if chunks else 1, 3))
    step = rows.stage(output, padded=padded_to(8)).rows
    num_tokens = 4 if chunks else 2
    assert (step.num_requests, step.num_tokens) == (2, num_tokens), "the step does not count it"
    assert column(rows, "counts", 2) == [3, chunks]
    assert column(rows, "query_start", 4)[-2:] == [num_tokens, 8]
    assert column(rows, "seq_lens", 8)[2:] == [0] * 6, "each line of padding may be looked at"
    assert gathered(rows, step, num_tokens=8)[num_tokens:] == [(0, 0, -1)] * (8 - num_tokens)
    assert gathered(rows, step, num_tokens=8)[:num_tokens] == gathered(rows, step)


def test_many_blocks_in_one_step() -> None:
    rows = Rows(max_num_seqs=3, max_model_len=400, block_size=1)
    rows.add([new("a", [1] * 300), new("b", [2] * 90)])
    blocks_a, blocks_b = tuple(range(1000, 1300)), tuple(range(500, 410, -1))
    rows.stage(plan(share("a", 300, 0, blocks_a), share("b", 90, 0, blocks_b)))
    assert rows.device.block_table[rows.row_of["a"], :300].tolist() == list(blocks_a)
    assert rows.device.block_table[rows.row_of["b"], :90].tolist() == list(blocks_b)


# ------------------------------------------------------------------------------------------------------ random steps


class Batch:
    """Requests as lists: what the rows should hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.free_blocks = rng.sample(range(200), 200)

    def enter(self, name: str) -> NewRequest:
        self.tokens[name] = [self.rng.randrange(1, 1000) for _ in range(self.rng.randint(1, 20))]
        self.blocks[name], self.computed[name] = [], 0
        num_prompt = self.rng.randint(1, len(self.tokens[name]))  # one that was preempted brings its output
        return new(name, self.tokens[name][:num_prompt], tuple(self.tokens[name][num_prompt:]))

    def leave(self, name: str) -> None:
        del self.tokens[name], self.computed[name]
        self.free_blocks += self.blocks.pop(name)

    def share(self, name: str) -> ScheduledRequest:
        remaining = len(self.tokens[name]) - self.computed[name]
        count = self.rng.choice([1, self.rng.randint(1, min(4, remaining)), min(4, remaining)])
        start = self.computed[name]
        needed = -(-(start + count) // BLOCK_SIZE) - len(self.blocks[name])
        added = tuple(self.free_blocks.pop() for _ in range(needed))
        self.blocks[name] += added
        self.computed[name] += count
        return share(name, count, start, added, samples=count == remaining)

    def expected(self, name: str, position: int) -> tuple[int, int, int]:
        slot = self.blocks[name][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        return self.tokens[name][position], position, slot


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_read_every_requests_own_tokens_from_its_own_blocks(seed: int) -> None:
    """A sampled token is written to the row on the device only, as the sampler does; the next step reads it there."""
    rng = random.Random(seed)
    batch, rows = Batch(rng), Rows()
    device = rows.device
    parts = (device.token_rows, device.block_table, device.token_ids, device.positions, *device.columns.values())
    assert {part.dtype for part in parts} == {torch.int32}, "kernels read them as they are"
    for number in range(25):
        for name in [name for name in batch.tokens if rng.random() < 0.15]:
            batch.leave(name)
            rows.table.free(name)
        entering = [batch.enter(f"{number}.{i}") for i in range(rng.randint(0, 2)) if len(batch.tokens) < 5]
        if entering:
            rows.add(entering)
        taking_part = [name for name in batch.tokens if rng.random() < 0.8 and len(batch.tokens[name]) < 40]
        if not taking_part:
            continue
        step = rows.stage(plan(*map(batch.share, taking_part)), padded=padded_to(24)).rows
        expected = [
            batch.expected(name, position)
            for name, count, length in zip(step.request_ids, np.diff(step.query_start), step.seq_lens, strict=True)
            for position in range(length - count, length)
        ]
        assert gathered(rows, step, num_tokens=24) == expected + [(0, 0, -1)] * (24 - len(expected))
        for place in step.sampled:
            name, token = step.request_ids[place], rng.randrange(1, 1000)
            device.token_rows[rows.row_of[name], len(batch.tokens[name])] = token
            batch.tokens[name].append(token)
