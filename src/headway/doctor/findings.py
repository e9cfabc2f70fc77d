"""What a check finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Good to know."""
    WARNING = "warning"
    """Something will be slow, or will fail in some use."""
    ERROR = "error"
    """Something is broken: Headway will not start, or does not use what it should."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    level: Level
    subject: str
    """What was examined, in one or two words."""
    what: str
    why: str = ""
    """What follows from it."""
    mend: str = ""
    """What to do. Warnings and errors always say it."""


def ok(subject: str, what: str) -> Finding:
    """A finding that nothing has to be done about."""
    return Finding(Level.OK, subject, what)


def note(subject: str, what: str, why: str = "", mend: str = "") -> Finding:
    """A finding that is good to know."""
    return Finding(Level.NOTE, subject, what, why, mend)


def warning(subject: str, what: str, why: str, mend: str) -> Finding:
    """A finding of something slow, or of something that fails in some use."""
    return Finding(Level.WARNING, subject, what, why, mend)


def error(subject: str, what: str, why: str, mend: str) -> Finding:
    """A finding of something broken."""
    return Finding(Level.ERROR, subject, what, why, mend)
