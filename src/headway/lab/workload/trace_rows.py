"""Recorded traffic: when requests came, how long they were, and which blocks of their prompts were the same.

What is known of a request stands in one row and stays together. Three kinds of files are understood by their columns:

    arrival_s, input_tokens, output_tokens               a CSV or JSON Lines file; either kind may be left out
    timestamp (ms), input_length, output_length, hash_ids    JSON Lines, as Mooncake's traces
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError
from headway.lab.workload.data_file import DataFile, FileVersion, Row, field_of, number_of
from headway.lab.workload.options_table import OptionsTable

MOONCAKE_BLOCK_TOKENS = 512
"""What a hash id of such a trace stands for."""


@dataclass(frozen=True)
class TraceRow:
    """One request of the past; None is what the file does not tell."""

    arrival_s: float | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    block_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """A file of rows, and in which order they are used."""

    file: DataFile
    is_shuffled: bool = False

    def read(self) -> list[TraceRow]:
        """All rows, in order of arrival where that is known."""
        return list(_sorted_rows(self.file, self.file.version()))

    def take(self, count: int, rng: random.Random) -> list[TraceRow]:
        """So many rows. Past the end the file begins again, with other block ids: nothing is shared with the time
        before."""
        rows = self.read()
        if self.is_shuffled:
            rng.shuffle(rows)
        highest = max((max(row.block_ids) for row in rows if row.block_ids), default=0)
        return [_again(rows[place % len(rows)], place // len(rows) * (highest + 1)) for place in range(count)]


def read_trace(table: OptionsTable, folders: tuple[Path, ...]) -> Trace:
    """From the table `[trace]`."""
    table.only("file", "order")
    is_shuffled = table.choice("order", ("file", "random"), "file") == "random"
    return Trace(DataFile(table.text("file"), folders), is_shuffled)


@functools.lru_cache(maxsize=4)
def _sorted_rows(file: DataFile, version: FileVersion) -> Sequence[TraceRow]:
    """A file is read once for as long as it stays the same: a search for a rate draws from it many times."""
    rows = [_parse(row, file, line) for line, row in file.rows()]
    if not rows:
        raise ConfigError(f"The data file '{file.name}' has no rows.")
    return sorted(rows, key=lambda row: row.arrival_s or 0.0)


def _again(row: TraceRow, added: int) -> TraceRow:
    if not added or row.block_ids is None:
        return row
    moved = tuple(block_id + added for block_id in row.block_ids)
    return TraceRow(row.arrival_s, row.num_input_tokens, row.num_output_tokens, moved)


def _parse(row: Row, file: DataFile, line: int) -> TraceRow:
    if "hash_ids" in row or "timestamp" in row:
        return _parse_mooncake(row, file, line)
    known = [name for name in ("arrival_s", "input_tokens", "output_tokens") if name in row]
    if not known:
        has = ", ".join(str(key) for key in row if key is not None) or "nothing"
        raise file.fail(line, f"none of arrival_s, input_tokens and output_tokens is there; it has {has}")
    found = {name: number_of(row, name, file=file, line=line) for name in known}
    return TraceRow(found.get("arrival_s"), _length(found.get("input_tokens")), _length(found.get("output_tokens")))


def _parse_mooncake(row: Row, file: DataFile, line: int) -> TraceRow:
    ids = field_of(row, "hash_ids", file=file, line=line)
    if not isinstance(ids, list) or not ids or not all(type(block) is int and block >= 0 for block in ids):
        raise file.fail(line, "hash_ids must be a list of whole numbers, none negative, at least one")
    arrival_ms, num_in, num_out = (
        number_of(row, name, file=file, line=line) for name in ("timestamp", "input_length", "output_length")
    )
    return TraceRow(arrival_ms / 1e3, _length(num_in), _length(num_out), tuple(ids))


def _length(value: float | None) -> int | None:
    return None if value is None else max(1, round(value))
