"""The `headway` command: picks the sub-command, runs it, and turns errors into one clean line.

Nothing heavy is imported before the arguments are known to be good: each sub-command's module is loaded when it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache

from headway import __version__
from headway.console.commands import ENTRY_POINTS, Command, CommandGroup, Commands
from headway.errors import HeadwayError
from headway.server.parent_link import FRONT_END_VARIABLE

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


OWN: Commands = {
    "generate": Command("headway.cli.generate", "Complete one or many prompts and print the answers."),
    "chat": Command("headway.cli.chat", "Talk with the model in the terminal."),
    "serve": Command(
        "headway.cli.serve", "Serve the model over HTTP, with OpenAI's API and a page to watch the batch."
    ),
    "pull": Command("headway.cli.pull", "Fetch a model of the Hugging Face hub, or bring it up to date."),
    "plan": Command("headway.cli.plan", "What a model takes in memory, and what it can serve, without loading it."),
    "kv": Command("headway.cli.kv", "Show what a running server's KV memory holds, as numbers and as a map."),
    "doctor": Command("headway.cli.doctor", "What this machine has, what is slow or wrong, and how to mend it."),
    "demo": Command("headway.cli.demo", "Watch a dozen requests of very different lengths share one batch."),
}
LISTED_LAST: Commands = {
    "options": Command("headway.cli.reference", "List every option of the engine and of sampling."),
    "completion": Command("headway.cli.completion", "Print a script that completes commands in bash, zsh or fish."),
    "version": Command("headway.cli.version", "Print the version and what this machine offers."),
}


@cache
def commands() -> Commands:
    """All commands: the engine's own, and those of installed packages, such as the lab's. A package's command cannot
    replace one of the engine's."""
    from importlib.metadata import entry_points  # imported late, because the parent of `headway serve` avoids imports

    found: dict[str, Command | CommandGroup] = {}
    for point in sorted(entry_points(group=ENTRY_POINTS)):
        try:
            found |= point.load()
        except Exception as error:  # another package's code may raise anything
            package = point.dist.name if point.dist else point.value
            print(f"headway: warning: commands of {package} cannot be loaded: {error}", file=sys.stderr)
    others = {name: command for name, command in found.items() if name not in OWN and name not in LISTED_LAST}
    return {**OWN, **others, **LISTED_LAST}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 failed, 2 wrong usage or input, 130 interrupted. `headway
    serve` on the command line becomes the parent of a process that runs it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None and arguments[:1] == ["serve"] and FRONT_END_VARIABLE not in os.environ:
            from headway.child_process import python_command
            from headway.cli.serve_parent import Parent

            return Parent(python_command("headway", *arguments)).run()
        return _dispatch(arguments)
    except HeadwayError as error:
        if os.environ.get("HEADWAY_DEBUG") == "1":
            raise
        print(f"headway: error: {' '.join(str(error).split())}", file=sys.stderr)
        # Errors that the user can repair, such as a wrong option or file, are ValueErrors too.
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it. Redirect stdout, or Python prints another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _dispatch(
    arguments: list[str],
    group: CommandGroup | None = None,
    prog: str = "headway",
) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-V", "--version") and group is None:
        print(f"headway {__version__}")
        return 0
    known = group.commands if group is not None else OWN if first in OWN else commands()
    if first in ("-h", "--help", "help"):
        print(_overview(known, prog, "An LLM engine with continuous batching." if group is None else group.summary))
        return 0
    from headway.console.flags import CommandParser
    from headway.errors import did_you_mean

    if first not in known:
        kind = "option" if first.startswith("-") else "command"
        hint = did_you_mean(first, tuple(known)) or f" The commands are: {', '.join(known)}."
        print(f"headway: error: unknown {kind} '{first}'.{hint}", file=sys.stderr)
        return 2
    command = known[first]
    if isinstance(command, CommandGroup):
        return _dispatch(arguments[1:], command, f"{prog} {first}")
    module = importlib.import_module(command.module)
    parser = CommandParser(prog=f"{prog} {first}", description=command.summary)
    module.add_arguments(parser)
    parsed = parser.parse(arguments[1:])
    parsed.command_line = [*prog.split(), *arguments]  # for the foot of the pages that it writes
    return int(module.run(parsed))


def _overview(commands: Commands, prog: str, summary: str) -> str:
    lines = [f"usage: {prog} COMMAND [options]", "", summary, "", "commands:"]
    lines += [f"  {name:<15} {command.summary}" for name, command in commands.items()]
    lines += [
        "",
        f"'{prog} COMMAND --help' lists a command's options, '--help-all' the engine's too. Without --model, the "
        "embedded SmolLM2-135M answers.",
    ]
    return "\n".join(lines)
