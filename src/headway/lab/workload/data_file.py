"""A file of data that a workload names: found beside the workload or in a data directory, and read row by row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError

Row = dict[str, Any]


@dataclass(frozen=True)
class FileVersion:
    path: Path
    changed_ns: int


@dataclass(frozen=True)
class DataFile:
    """A name, and the folders where it is looked for. It is opened when work is drawn, not before."""

    name: str
    folders: tuple[Path, ...] = ()

    def path(self) -> Path:
        """Where it is; `ConfigError` tells where it was looked for."""
        named = Path(self.name).expanduser()
        places = [named] if named.is_absolute() else [folder / named for folder in self.folders or (Path(),)]
        for place in places:
            if place.is_file():
                return place
        looked = " or ".join(f"'{place.parent}'" for place in places)
        raise ConfigError(
            f"The data file '{self.name}' is needed and is not in {looked}. "
            "--data-dir DIR names the folder that has it; docs/workloads.md says where it comes from."
        )

    def version(self) -> FileVersion:
        """Changes when the file does."""
        path = self.path()
        return FileVersion(path, path.stat().st_mtime_ns)

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Line number and row: of a JSON Lines file objects, of any other the texts of a CSV file with a header."""
        path = self.path()
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                if path.suffix in (".jsonl", ".json", ".ndjson"):
                    yield from self._objects(file)
                else:
                    reader = csv.DictReader(file)
                    for row in reader:
                        yield reader.line_num, row
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"Cannot read the data file '{path}': {reason}.") from error

    def fail(self, line: int, problem: str) -> ConfigError:
        """The error about one row."""
        return ConfigError(f"The data file '{self.name}', line {line}: {problem}.")

    def _objects(self, lines: Iterator[str]) -> Iterator[tuple[int, Row]]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise self.fail(number, "it is not JSON") from None
            if not isinstance(row, dict):
                raise self.fail(number, "it is not a JSON object")
            yield number, row


def field_of(row: Row, name: str, *, file: DataFile, line: int) -> Any:
    """A field that the row must have."""
    if row.get(name) is None:
        has = ", ".join(str(key) for key in row if key is not None) or "nothing"
        raise file.fail(line, f"there is no '{name}'; it has {has}")
    return row[name]


def number_of(row: Row, name: str, *, file: DataFile, line: int, least: float = 0.0) -> float:
    """A number that the row must have."""
    value = field_of(row, name, file=file, line=line)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not least <= number < float("inf"):
        raise file.fail(line, f"'{name}' must be a number of at least {least:g}, not {value!r}")
    return number
