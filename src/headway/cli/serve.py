"""`headway serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import stat
import sys
import textwrap
import time
import typing
from pathlib import Path
from typing import Any

from headway.config import EngineConfig
from headway.console.flags import FlagSpec, add_flags, chosen, converter, engine_flags, is_switch, memory_size
from headway.errors import ConfigError
from headway.server.admission.service_classes import EXAMPLE
from headway.server.server_config import API_KEY_VARIABLE, ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "served_model", nargs="?", metavar="MODEL", help="The same as --model. Default: the embedded model."
    )
    add_flags(parser, server_flags())
    add_flags(parser, engine_flags())
    parser.epilog = f"A file for --service-classes:\n\n{textwrap.indent(EXAMPLE, '    ')}"
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)


def run(arguments: argparse.Namespace) -> int:
    begun_s = time.monotonic()
    options = chosen(arguments, engine_flags())
    if arguments.served_model is not None:
        if options.get("model") not in (None, arguments.served_model):
            raise ConfigError("MODEL and --model name two models; give one of them.")
        options["model"] = arguments.served_model
    EngineConfig.from_options(**options)
    server_options = chosen(arguments, server_flags())
    config = server_config(server_options)
    for line in key_warnings(server_options):
        _say(line)

    from headway.server.serving import run_server

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it logs a warning for each malformed request
    run_server(config, options, _say, begun_s=begun_s)
    return 0


def server_config(options: dict[str, Any]) -> ServerConfig:
    """Build the server's options from flags and the environment."""
    several = {name: tuple(options[name]) for name in _REPEATABLE if name in options}
    if from_environment := os.environ.get(API_KEY_VARIABLE):
        several["api_key"] = (*several.get("api_key", ()), from_environment)
    return ServerConfig(**(options | several))


def key_warnings(options: dict[str, Any]) -> list[str]:
    """Warnings about keys that other users of this machine can read."""
    lines = []
    if "api_key" in options:
        lines.append(
            "Warning: --api-key shows in the list of processes, to every user of this machine; "
            f"--api-key-file or ${API_KEY_VARIABLE} does not."
        )
    file = options.get("api_key_file")
    if file is not None and Path(file).expanduser().stat().st_mode & stat.S_IROTH:
        lines.append(f"Warning: every user of this machine can read the keys in '{file}'; chmod 600 prevents it.")
    return lines


def server_flags() -> list[FlagSpec]:
    """Every option of the server."""
    hints = typing.get_type_hints(ServerConfig)
    return [_flag(field, hints[field.name]) for field in dataclasses.fields(ServerConfig)]


def _flag(field: dataclasses.Field[Any], hint: Any) -> FlagSpec:
    metavar = field.metadata["metavar"]
    return FlagSpec(
        name=field.name,
        help=field.metadata["help"],
        default=field.default,
        section="server",
        metavar=metavar or {int: "N", float: "SECONDS"}.get(hint, "TEXT"),
        choices=field.metadata["choices"],
        convert=memory_size if metavar == "BYTES" else converter(hint) if hint in (int, float) else str,
        repeatable=field.name in _REPEATABLE,
        takes_several=field.name in _TAKE_SEVERAL,
        is_switch=is_switch(hint),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_REPEATABLE = tuple(field.name for field in dataclasses.fields(ServerConfig) if isinstance(field.default, tuple))
_TAKE_SEVERAL = frozenset({"served_model_name"})
"""Options that take several values at once, as in vLLM: --served-model-name a b c."""
