"""Commands for installing a package into the running environment, with the tools that it has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import sys


def install_command(*requirements: str) -> str:
    """The command that installs these requirements: with pip, with uv if there is no pip, or else with pip from
    ensurepip."""
    wanted = shlex.join(requirements)
    if importlib.util.find_spec("pip") is not None:
        return f"{sys.executable} -m pip install {wanted}"
    if shutil.which("uv") is not None:
        return f"uv pip install --python {sys.executable} {wanted}"
    return f"{sys.executable} -m ensurepip && {sys.executable} -m pip install {wanted}"


def install_extra(name: str) -> str:
    """The command that installs the requirements of one of Headway's extras. Headway itself is already installed, and
    need not be on any index."""
    marker = re.compile(rf"""; *extra *== *["']{name}["']$""")
    requirements = importlib.metadata.requires("headway") or []
    return install_command(*(marker.sub("", one) for one in requirements if marker.search(one)))
