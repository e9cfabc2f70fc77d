"""Input files of a workload: tables of its TOML file and rows of data files, with each value checked.

Unknown keys, values of wrong types, and numbers that are not finite or out of bounds are refused, so that drawn
requests have usable sizes and times. An error names its place and what is allowed there.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headway.errors import ConfigError, did_you_mean

MOST = 2**40
"""The bound of all numbers of a workload that have no other one."""

MOST_TOKENS = 2**24
"""The most tokens of one prompt or one answer."""

MOST_SECONDS = 1e9
"""The most seconds of a workload from its first arrival to its last: 31 years. A later clock loses microseconds."""

Row = dict[str, Any]


class OptionsTable:
    """Reads values by key. `where` is the table's own name, as errors give it."""

    def __init__(self, values: object, where: str = "") -> None:
        self._where = where
        if not isinstance(values, Mapping):
            self.fail(f"a table is expected, not {_shown(values)}")
        self._values: Mapping[str, Any] = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def only(self, *keys: str) -> OptionsTable:
        """`ConfigError` if there is any other key."""
        for key in self._values:
            if key not in keys:
                hint = did_you_mean(key, keys) or f" The keys are: {', '.join(keys)}."
                self.fail(f"there is no '{key}' here.{hint}")
        return self

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or not value:
            self.fail(f"{key} must be text, not {_shown(value)}")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self._get(key, default)
        if value not in choices:
            hint = did_you_mean(str(value), tuple(choices))
            self.fail(f"{key} must be one of {', '.join(choices)}; not {_shown(value)}.{hint}")
        return str(value)

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fail(f"{key} must be a whole number {_bound(value, least, most)}, not {_shown(value)}")
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        is_above: bool = True,
        most: float = MOST,
    ) -> float:
        """A finite number above `least`, or also equal to it, and not above `most`."""
        value = self._get(key, default)
        if not is_number(value) or not (least < value <= most or (value == least and not is_above)):
            self.fail(f"{key} must be a number {_bound(value, least, most, is_above=is_above)}, not {_shown(value)}")
        return float(value)

    def switch(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key} must be true or false, not {_shown(value)}")
        return value

    def weights(self, key: str, count: int) -> tuple[float, ...]:
        """`count` numbers, none negative, not all 0."""
        value = self._get(key, None)
        good = isinstance(value, list) and len(value) == count and all(is_number(w) and 0 <= w <= MOST for w in value)
        if not good or not sum(value) > 0:
            self.fail(f"{key} must be a list of {count} numbers, none below 0 and one above it; not {_shown(value)}")
        return tuple(float(weight) for weight in value)

    def raw(self, key: str) -> Any:
        """The value, unchecked; None if the key is missing."""
        return self._values.get(key)

    def table(self, key: str) -> OptionsTable:
        return OptionsTable(self._get(key, None), f"{self._where}{key}: ")

    def fail(self, message: str) -> NoReturn:
        """Raise `ConfigError` with the place of the error."""
        raise ConfigError(f"{self._where}{message}" + ("" if message.endswith((".", "?")) else "."))

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            self.fail(f"'{key}' is needed")
        return value


def is_number(value: object) -> bool:
    """Whether a value is a number, finite as a float, and not a truth value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def _bound(value: object, least: float, most: float, *, is_above: bool = False) -> str:
    """The bound that a value does not keep, as a text."""
    if isinstance(value, int | float) and value > most:
        return f"of at most {most:,.10g}"
    return f"above {least:g}" if is_above else f"of at least {least:g}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class FileVersion:
    path: Path
    changed_ns: int


@dataclass(frozen=True)
class DataFile:
    """The name of a file, and the folders where it is searched. It is opened when work is drawn, not before."""

    name: str
    folders: tuple[Path, ...] = ()

    def path(self) -> Path:
        """The file's path; `ConfigError` lists the folders that were searched."""
        named = Path(self.name).expanduser()
        places = [named] if named.is_absolute() else [folder / named for folder in self.folders or (Path(),)]
        for place in places:
            if place.is_file():
                return place
        looked = " or ".join(f"'{place.parent}'" for place in places)
        raise ConfigError(
            f"The data file '{self.name}' is needed and is not in {looked}. "
            "--data-dir DIR names the folder that has it; docs/workloads.md (Data) says how to get it."
        )

    def version(self) -> FileVersion:
        """A value that changes when the file does."""
        path = self.path()
        return FileVersion(path, path.stat().st_mtime_ns)

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield line numbers and rows: objects of a JSON Lines file, texts by column of any other file, which is CSV
        with a header."""
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


def number_of(row: Row, name: str, *, file: DataFile, line: int, least: float = 0.0, most: float = MOST) -> float:
    """A number that the row must have."""
    value = field_of(row, name, file=file, line=line)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan" if isinstance(value, str) else "inf")
    if isinstance(value, bool) or not least <= number <= most:
        raise file.fail(line, f"'{name}' must be a number {_bound(number, least, most)}, not {_shown(value)}")
    return number
