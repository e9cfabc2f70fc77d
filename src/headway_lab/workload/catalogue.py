"""The workloads that come with the package, and how a workload is found by its name or its path."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from headway.console.flags import suggest
from headway.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class FoundWorkload:
    """A workload file, and the folder where the data files that it names are searched first."""

    file: Path
    data_folder: Path


def shipped_workloads() -> dict[str, Path]:
    """Workloads that come with the package, by name."""
    folder = Path(str(files("headway_lab.workload") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_workload(name_or_path: str | Path) -> FoundWorkload:
    """The file at a path, or the shipped workload of a name. Data files are searched beside a file, and in the current
    folder for a shipped workload. Raises `ConfigError` if a name is not known."""
    path = Path(name_or_path).expanduser()
    if path.is_file() or path.suffix or path.name != str(name_or_path):
        return FoundWorkload(path, path.parent)
    shipped = shipped_workloads()
    if path.name in shipped:
        return FoundWorkload(shipped[path.name], Path())
    hint = did_you_mean(path.name, tuple(shipped)) or f" They are: {', '.join(shipped)}."
    raise ConfigError(f"There is neither a file '{path}' nor a workload of that name that is shipped.{hint}")


def add_workload_argument(parser: argparse._ActionsContainer, name: str, lead: str, **more: Any) -> None:
    """Add an argument that takes a workload. `lead` begins its help, `more` is passed to argparse."""
    names = tuple(shipped_workloads())
    text = f"{lead} A file (docs/workloads.md), or the name of a shipped one: {', '.join(names)}."
    suggest(parser.add_argument(name, metavar="WORKLOAD", help=text, **more), names)
