"""`headway kv`: what a running server's KV memory holds, as numbers and as a map."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from headway.console.flags import number
from headway.console.output_files import check_writable
from headway.errors import ConfigError
from headway.server.server_config import API_KEY_VARIABLE, ServerConfig

if TYPE_CHECKING:
    from rich.console import Console

    from headway.cli.kv_state import KVState

MAP_PATIENCE_S = 10.0
"""How long to wait for the map, which follows the first frame in a separate one, later if a step is long."""
LEAST_INTERVAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = ServerConfig()
    parser.add_argument("--url", default=default.url, help="Where the server is. (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE),
        metavar="KEY",
        help=f"The server's key. (default: ${API_KEY_VARIABLE})",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=number(),
        const=1.0,
        metavar="SECONDS",
        help="Go on until Ctrl-C, every second or as often as this says.",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write the numbers and the map as a page instead.")


def run(arguments: argparse.Namespace) -> int:
    if arguments.watch is not None and arguments.html is not None:
        raise ConfigError("--html is a picture of one moment; it does not go with --watch.")
    if arguments.watch is not None and not arguments.watch >= LEAST_INTERVAL_S:
        raise ConfigError(f"--watch must be at least {LEAST_INTERVAL_S} seconds, not {arguments.watch:g}.")
    check_writable(arguments.html)

    from rich.console import Console

    from headway.cli.kv_state import live_events, states

    console = Console(highlight=False)
    with closing(live_events(arguments.url, arguments.api_key)) as events:
        found = states(events)
        if arguments.html is not None:
            _write_page(_first_whole(found), arguments.html, console)
        elif arguments.watch is None:
            _show_once(_first_whole(found), console)
        else:
            with suppress(KeyboardInterrupt):
                _watch(found, console, arguments.watch)
    return 0


def _first_whole(found: Iterator[KVState]) -> KVState:
    """The first state with a map, or a state without one if that takes too long."""
    from headway.cli.kv_state import ServerUnreachableError

    give_up_s = time.monotonic() + MAP_PATIENCE_S
    state = None
    for state in found:
        if state.cells is not None or time.monotonic() >= give_up_s:
            return state
    if state is None:
        raise ServerUnreachableError("The server ended the stream before it sent anything; it may be stopping.")
    return state


def _show_once(state: KVState, console: Console) -> None:
    from headway.cli.kv_picture import KVPicture

    console.print(KVPicture(state))


def _write_page(state: KVState, file: Path, console: Console) -> None:
    from headway.cli.kv_picture import page

    try:
        file.write_text(page(state, datetime.now().astimezone()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write '{file}': {error.strerror}.") from error
    console.print(f"Wrote {file}", markup=False, soft_wrap=True)


def _watch(found: Iterator[KVState], console: Console, interval_s: float) -> None:
    """Print each picture: in place on a terminal, one below the other elsewhere."""
    from rich.live import Live

    from headway.cli.kv_picture import KVPicture

    due_s = 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for state in found:
            if state.cells is None or time.monotonic() < due_s:
                continue
            due_s = time.monotonic() + interval_s
            if console.is_terminal:
                live.update(KVPicture(state), refresh=True)
            else:
                console.print(KVPicture(state))
                console.print()
    console.print("The server has ended the stream.")
