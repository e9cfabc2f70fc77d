"""`headway completion`: a script that completes commands, options and their values in bash, zsh or fish.

The script is made from the parsers of all commands, those of other packages included. A shell that has read it starts
no Python when a person presses TAB. Values that are not chosen from a list are completed as files or folders if their
placeholder says that they are, and with the names that `suggest` has noted.
"""

from __future__ import annotations

import argparse
import importlib
import re
from typing import Any

import shtab

from headway.cli.main import commands
from headway.console.commands import Command, CommandGroup, Commands
from headway.console.flags import CommandParser, suggested

SHELLS = ("bash", "zsh", "fish")
_FILE_WORDS = frozenset({"FILE", "PATH", "MODEL", "LOG", "RESULT"})
"""Placeholders of values that are files, or folders beside files."""

_INSTALLING = """\
examples:
  bash    headway completion bash > ~/.local/share/bash-completion/completions/headway
  zsh     headway completion zsh > ~/.zfunc/_headway      (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish    headway completion fish > ~/.config/fish/completions/headway.fish

Write the script again after an upgrade."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _INSTALLING
    parser.add_argument("shell", choices=SHELLS, help="Whose script is printed.")


def run(arguments: argparse.Namespace) -> int:
    print(completion_script(arguments.shell))
    return 0


def completion_script(shell: str) -> str:
    """The script for a shell."""
    return shtab.complete(_parser_of_all(commands()), shell)


def _parser_of_all(known: Commands) -> CommandParser:
    """One parser with every command as a sub-command."""
    parser = CommandParser(prog="headway", description="An LLM engine with continuous batching.")
    parser.add_argument("-V", "--version", action="store_true", help="Print the version.")
    _add_commands(parser, known)
    return parser


def _add_commands(parser: CommandParser, known: Commands) -> None:
    below = parser.add_subparsers(metavar="COMMAND", parser_class=CommandParser)
    for name, command in known.items():
        one = below.add_parser(name, help=_literal(command.summary), description=command.summary)
        if isinstance(command, CommandGroup):
            _add_commands(one, command.commands)
        else:
            _add_options(one, command)


def _add_options(parser: CommandParser, command: Command) -> None:
    importlib.import_module(command.module).add_arguments(parser)
    parser.show_all()
    for action in parser._actions:
        if action.choices is None and (complete := _completion_of(action)) is not None:
            action.complete = complete  # type: ignore[attr-defined]  # where shtab looks for it


def _completion_of(action: argparse.Action) -> Any:
    """How shtab completes a value; `None` if only the user knows it."""
    names = suggested(action)
    if names:
        return _names_or_files(action.dest, names)
    words = set(re.split(r"\W", str(action.metavar)))
    if "DIR" in words:
        return shtab.DIRECTORY
    return shtab.FILE if words & _FILE_WORDS else None


def _names_or_files(of: str, names: tuple[str, ...]) -> dict[str, Any]:
    function, listed = f"_headway_{of}_or_file", " ".join(names)
    return {
        "bash": function,
        "zsh": function,
        "fish": f"{listed} (__fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'{function}() {{ compgen -W "{listed}" -- "$1"; compgen -f -- "$1"; }}',
            "zsh": f"{function}() {{ compadd -- {listed}; _files }}",
        },
    }


def _literal(text: str) -> str:
    """A text in which argparse replaces nothing."""
    return text.replace("%", "%%")
