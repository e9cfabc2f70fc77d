"""Prints what Headway requires, and its extras, as pyproject.toml declares it. The image installs these packages before
Headway itself, so that their layer stays the same when only Headway changes.

    python3 requirements.py pyproject.toml otel nvml > requirements.txt
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        raise SystemExit(f"There is no extra {unknown[0]!r}. There are: {', '.join(optional)}.")
    return [*project["dependencies"], *(one for extra in extras for one in optional[extra])]


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]), sys.argv[2:]), sep="\n")
