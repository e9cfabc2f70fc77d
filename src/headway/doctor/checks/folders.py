"""Where kernels and models are kept."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.checks.memory import gib
from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, ok, warning
from headway.doctor.tuning import BOUNDS

_SUBJECT = "folders"


def check_folders(facts: Facts) -> Iterator[Finding]:
    """Whether the cache folders can be used."""
    for folder in facts.folders:
        where = f"The folder for {folder.purpose}, {folder.path}"
        other = f"Or choose another folder with {folder.variable}."
        if folder.problem:
            yield warning(
                _SUBJECT,
                f"{where}, cannot be written to: {folder.problem}.",
                "What belongs there is made or fetched again at each start, or cannot be fetched at all.",
                f"Make it writable for this user. {other}",
            )
        elif folder.is_noexec:
            yield warning(
                _SUBJECT,
                f"{where}, is on a file system from which no library is run (noexec).",
                "The compiled CPU kernels cannot be loaded, and torch takes their place, several times as slow.",
                f"Mount it without noexec. {other}",
            )
        elif folder.free is not None and folder.free < BOUNDS.small_disk:
            yield warning(
                _SUBJECT,
                f"{where}, has {gib(folder.free)} free.",
                "Models of the hub do not fit.",
                f"Free some space. {other}",
            )
        else:
            free = "" if folder.free is None else f", {gib(folder.free)} free"
            yield ok(_SUBJECT, f"{folder.purpose.capitalize()}: {folder.path}{free}.")
