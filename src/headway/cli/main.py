"""The `headway` command: picks the sub-command, runs it, and turns errors into one clean line.

Nothing heavy is imported before the arguments are known to be good: each sub-command's module is loaded when it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.errors import HeadwayError
from headway.server.parent_link import FRONT_END_VARIABLE

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


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


COMMANDS: Mapping[str, Command | CommandGroup] = {
    "generate": Command("headway.cli.generate", "Complete one or many prompts and print the answers."),
    "chat": Command("headway.cli.chat", "Talk with the model in the terminal."),
    "serve": Command(
        "headway.cli.serve", "Serve the model over HTTP, with OpenAI's API and a page to watch the batch."
    ),
    "plan": Command("headway.cli.plan", "What a model takes in memory, and what it can serve, without loading it."),
    "kv": Command("headway.cli.kv", "Show what a running server's KV memory holds, as numbers and as a map."),
    "demo": Command("headway.cli.demo", "Watch a dozen requests of very different lengths share one batch."),
    "bench": CommandGroup(
        "Measure speed, beside the least time that the machine allows.",
        {
            "latency": Command(
                "headway.lab.bench.bench_latency_command", "One batch of equal requests, again and again."
            ),
            "throughput": Command(
                "headway.lab.bench.bench_throughput_command", "Many requests, all at once or as in a trace."
            ),
            "serve": Command("headway.lab.bench.bench_serve_command", "Put a load on any server with OpenAI's API."),
            "sweep": Command(
                "headway.lab.bench.bench_sweep_command", "The same work at several rates, or with several settings."
            ),
            "capacity": Command(
                "headway.lab.bench.bench_capacity_command", "The highest rate that meets objectives for latency."
            ),
            "compare": Command("headway.lab.bench.bench_compare_command", "Results beside each other."),
        },
    ),
    "workload": Command(
        "headway.lab.workload.workload_command", "Show what a workload file describes, as numbers and as plots."
    ),
    "calibrate": Command(
        "headway.lab.sim.calibrate_command", "Measure what steps cost on this machine, for sim and tune."
    ),
    "sim": Command(
        "headway.lab.sim.sim_command", "Simulate a workload on a calibrated machine, or on several, in seconds."
    ),
    "sim-check": Command(
        "headway.lab.sim.sim_check_command", "Run a workload in the engine and in the simulator, and compare."
    ),
    "tune": Command("headway.lab.tune.tune_command", "Find the options that serve a workload best, by simulation."),
    "claims": Command(
        "headway.lab.claims.claims_command", "Measure published claims about serving again, each by its name."
    ),
    "train-predictor": Command(
        "headway.lab.train_predictor", "Learn from a traffic log to tell long answers from short ones beforehand."
    ),
    "options": Command("headway.cli.reference", "List every option of the engine and of sampling."),
    "version": Command("headway.cli.version", "Print the version and what this machine offers."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 failed, 2 wrong usage, 130 interrupted. `headway serve` on
    the command line becomes the parent of a process that runs it."""
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
        return 1
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left. Point stdout elsewhere, or Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _dispatch(
    arguments: list[str],
    commands: Mapping[str, Command | CommandGroup] = COMMANDS,
    prog: str = "headway",
    summary: str = "An LLM engine with continuous batching.",
) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "help"):
        print(_overview(commands, prog, summary))
        return 0
    if first in ("-V", "--version") and commands is COMMANDS:
        first = "version"
    from headway.cli.flags import CommandParser
    from headway.config import did_you_mean

    if first not in commands:
        kind = "option" if first.startswith("-") else "command"
        hint = did_you_mean(first, tuple(commands)) or f" The commands are: {', '.join(commands)}."
        print(f"headway: error: unknown {kind} '{first}'.{hint}", file=sys.stderr)
        return 2
    command = commands[first]
    if isinstance(command, CommandGroup):
        return _dispatch(arguments[1:], command.commands, f"{prog} {first}", command.summary)
    module = importlib.import_module(command.module)
    parser = CommandParser(prog=f"{prog} {first}", description=command.summary)
    module.add_arguments(parser)
    parsed = parser.parse(arguments[1:])
    parsed.command_line = [*prog.split(), *arguments]  # for the foot of the pages that it writes
    return int(module.run(parsed))


def _overview(commands: Mapping[str, Command | CommandGroup], prog: str, summary: str) -> str:
    lines = [f"usage: {prog} COMMAND [options]", "", summary, "", "commands:"]
    lines += [f"  {name:<15} {command.summary}" for name, command in commands.items()]
    lines += [
        "",
        f"'{prog} COMMAND --help' lists a command's options, '--help-all' the engine's too. Without --model, the "
        "embedded SmolLM2-135M answers.",
    ]
    return "\n".join(lines)
