"""The `headway` command: picks the sub-command, runs it, and turns errors into one clean line.

Nothing heavy is imported before the arguments are known to be good: each sub-command's module is loaded when it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headway.cli.flags import CommandParser
from headway.config import did_you_mean
from headway.errors import HeadwayError

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True)
class Command:
    """A sub-command. Its module has `add_arguments(parser)` and `run(namespace) -> exit code`."""

    module: str
    summary: str


COMMANDS = {
    "generate": Command("headway.cli.generate", "Complete one or many prompts and print the answers."),
    "chat": Command("headway.cli.chat", "Talk with the model in the terminal."),
    "demo": Command("headway.cli.demo", "Watch a dozen requests of very different lengths share one batch."),
    "options": Command("headway.cli.reference", "List every option of the engine and of sampling."),
    "version": Command("headway.cli.version", "Print the version and what this machine offers."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except HeadwayError as error:
        if os.environ.get("HEADWAY_DEBUG") == "1":
            raise
        print(f"headway: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left. Point stdout elsewhere, or Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if first in ("-V", "--version"):
        first = "version"
    if first not in COMMANDS:
        kind = "option" if first.startswith("-") else "command"
        hint = did_you_mean(first, tuple(COMMANDS)) or f" The commands are: {', '.join(COMMANDS)}."
        print(f"headway: error: unknown {kind} '{first}'.{hint}", file=sys.stderr)
        return 2
    command = COMMANDS[first]
    module = importlib.import_module(command.module)
    parser = CommandParser(prog=f"headway {first}", description=command.summary)
    module.add_arguments(parser)
    return int(module.run(parser.parse(arguments[1:])))


def _overview() -> str:
    lines = ["usage: headway COMMAND [options]", "", "An LLM engine with continuous batching.", "", "commands:"]
    lines += [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "'headway COMMAND --help' lists a command's options. Without --model, the embedded SmolLM2-135M answers.",
    ]
    return "\n".join(lines)
