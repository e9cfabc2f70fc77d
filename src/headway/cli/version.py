"""`headway version`: what is installed and what this machine offers, for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

from headway import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--short", action="store_true", help="Only the version number.")


def run(arguments: argparse.Namespace) -> int:
    if arguments.short:
        print(__version__)
        return 0
    print(f"headway {__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}, {_num_cores()} cores")
    print(f"torch {importlib.metadata.version('torch')} ({_cuda()})")
    return 0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _cuda() -> str:
    import torch

    return f"CUDA: {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no CUDA device"
