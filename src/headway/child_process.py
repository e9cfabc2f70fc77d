"""Helpers for child processes: starting Python, ending with the parent, logs on stderr, and dumping stacks."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
DUMP_SIGNAL = signal.SIGUSR2
"""A process that receives it writes the stacks of all its threads to stderr, even while it holds the interpreter lock.
"""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter. A file in the working directory that is named like a module
    (`torch.py`) is not imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


def show_stacks_on_signal() -> None:
    """Make `DUMP_SIGNAL` dump this process's stacks. Without this, the signal would end the process."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)


def show_logs(level: str | int, form: str) -> None:
    """Write log messages from this level on to stderr; those of other packages from INFO on at most."""
    number = logging.getLevelNamesMapping()[level.upper()] if isinstance(level, str) else level
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(number)
    logging.basicConfig(level=max(number, logging.INFO), format=form, handlers=[handler])
    logging.getLogger("headway").setLevel(number)


def end_with_parent(parent_pid: int) -> None:
    """Have this process killed as soon as its parent has ended, even while it is stopped. Only Linux can do that. The
    signal is sent when the thread that started this process ends, so that thread must live as long as the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent has ended before
        os._exit(1)
