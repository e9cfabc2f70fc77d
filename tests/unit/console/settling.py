"""Options as an operator gives them: flags, environment and a file, settled without a command."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway.cli.every_option import every_option
from headway.console.flags import CommandParser, FlagSpec
from headway.console.settled_options import SettledOptions, add_settled_flags, settle

SPECS = every_option()


class Sample(NamedTuple):
    """A value of an option in its three spellings. It is not the default."""

    flags: list[str]
    variable: str
    toml: str


@functools.cache
def parser() -> CommandParser:
    made = CommandParser(prog="test")
    made.add_argument("served_model", nargs="?")
    add_settled_flags(made, SPECS)
    return made


def settled(
    *flags: str, environment: Mapping[str, str] | None = None, file: Path | None = None, model: str | None = None
) -> SettledOptions:
    given = [*flags, *([] if file is None else ["--config", str(file)])]
    arguments: argparse.Namespace = parser().parse(given)
    return settle(arguments, SPECS, SPECS, model=model, environment=environment or {})


def sample(spec: FlagSpec) -> Sample:
    """A value that the option's declaration allows."""
    if spec.is_switch:
        value = not spec.default
        flag = spec.flag if value else f"--no-{spec.flag.removeprefix('--')}"
        return Sample([flag], str(value).lower(), str(value).lower())
    if spec.choices:
        text = next(choice for choice in spec.choices if choice != spec.default)
    elif spec.metavar == "BYTES":
        text = "3MiB"
    elif isinstance(spec.convert("7") if spec.metavar != "ROLES" else "", int | float):
        return Sample([spec.flag, "7"], "7", "7")
    else:
        text = "x.y/Z ü"
    return Sample([spec.flag, text], text, f'"{text}"')
