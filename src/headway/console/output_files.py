"""Tables that commands print, and files that they write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from headway.errors import ConfigError


def write_json(path: str | Path, result: object) -> None:
    """Write the file. Raises `ConfigError` if it cannot be written."""
    try:
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write the result '{path}': {error.strerror}.") from error


def write_text(path: str | Path, text: str) -> None:
    """Write the file. Raises `ConfigError` if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write '{path}': {error.strerror}.") from error


def check_writable(*paths: str | Path | None) -> None:
    """Raise before a measurement begins if its result files cannot be written."""
    for path in paths:
        if path is None:
            continue
        file = Path(path).resolve()
        if not file.parent.is_dir():
            raise ConfigError(f"Cannot write '{path}': there is no folder '{Path(path).parent}'.")
        if file.is_dir():
            raise ConfigError(f"Cannot write '{path}': it is a folder.")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"Cannot write '{path}': permission denied.")


def print_table(titles: list[str], rows: list[list[str]], *, file: Any = None) -> None:
    """Print a table with the first column left-aligned and numbers right-aligned, for any width of the terminal."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    for row in [titles, *rows]:
        cells = [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip(), file=file)
