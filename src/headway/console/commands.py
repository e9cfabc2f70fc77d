"""The record of a `headway` sub-command, which main reads before it loads the command's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A sub-command. Its module has `add_arguments(parser)` and `run(namespace) -> exit code`."""

    module: str
    summary: str


@dataclass(frozen=True)
class CommandGroup:
    """A sub-command that has sub-commands of its own."""

    summary: str
    commands: Mapping[str, Command]


Commands = Mapping[str, Command | CommandGroup]

ENTRY_POINTS = "headway.commands"
"""An installed package adds commands to `headway` by an entry point of this group, which names a `Commands`."""
