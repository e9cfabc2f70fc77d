"""How Python processes are started, end with the process that started them, and show where they stand."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
DUMP_SIGNAL = signal.SIGUSR2
"""A process that gets it writes the stacks of all its threads to stderr, also while it holds the interpreter lock."""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter. A file in the working directory that has the name of a
    module (`torch.py`) is not imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


def show_stacks_on_signal() -> None:
    """From now on `DUMP_SIGNAL` shows where this process stands. Without this, the signal would end it."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)


def end_with_parent(parent_pid: int) -> None:
    """Have this process killed as soon as its parent has ended, even while it is stopped. Only Linux can do that. The
    signal comes at the end of the thread that started this process, so that thread must live as long as its process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent has ended before
        os._exit(1)
