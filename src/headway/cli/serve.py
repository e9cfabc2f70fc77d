"""`headway serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import functools
import logging
import stat
import sys
import textwrap
import time
from pathlib import Path

from headway.child_process import show_logs
from headway.cli.every_option import every_option, server_flags
from headway.console.flags import engine_flags
from headway.console.settled_options import SettledOptions, add_settled_flags, settle
from headway.server.admission.service_classes import EXAMPLE
from headway.server.server_config import API_KEY_VARIABLE, ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "served_model", nargs="?", metavar="MODEL", help="The same as --model. Default: the embedded model."
    )
    add_settled_flags(parser, every_option())
    parser.epilog = f"A file for --service-classes:\n\n{textwrap.indent(EXAMPLE, '    ')}"
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)


def run(arguments: argparse.Namespace) -> int:
    begun_s = time.monotonic()
    settled = settle(arguments, every_option(), every_option(), model=arguments.served_model)
    settled.engine_config()
    config = server_config(settled)
    if arguments.print_config:
        print(settled.toml(), end="")
        return 0
    for line in key_warnings(settled):
        _say(line)

    from headway.server.serving import run_server

    show_logs(config.log_level, "%(levelname)s %(name)s: %(message)s")
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it logs a warning for each malformed request
    run_server(config, settled.given({spec.name for spec in engine_flags()}), _say, begun_s=begun_s)
    return 0


def server_config(settled: SettledOptions) -> ServerConfig:
    """The server's options. Raises `ConfigError`."""
    with settled.naming_sources():
        return ServerConfig(**settled.given({spec.name for spec in server_flags()}))


def key_warnings(settled: SettledOptions) -> list[str]:
    """Warnings about keys that other users of this machine can read."""
    lines = []
    keys = settled.settings.get("api_key")
    sources = [] if keys is None else keys.sources
    if "--api-key" in sources:
        lines.append(
            "Warning: --api-key shows in the list of processes, to every user of this machine; "
            f"--api-key-file or ${API_KEY_VARIABLE} does not."
        )
    files = [source for source in sources if not source.startswith(("--", "$"))]
    if "api_key_file" in settled.settings:
        files.append(settled.settings["api_key_file"].value)
    for file in files:
        if Path(file).expanduser().stat().st_mode & stat.S_IROTH:
            lines.append(f"Warning: every user of this machine can read the keys in '{file}'; chmod 600 prevents it.")
    return lines


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
