"""Reads the facts of this machine. Whatever cannot be read is left out: no error ends the examination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway import __version__
from headway.console.flags import FlagSpec
from headway.doctor.facts import Facts
from headway.doctor.read.cuda import read_cuda
from headway.doctor.read.host import read_memory, read_processor
from headway.doctor.read.installed import read_kernels, read_software
from headway.doctor.read.surroundings import read_folders, read_network, read_settings


def read_facts(environment: Mapping[str, str], options: Sequence[FlagSpec], *, host: str, port: int) -> Facts:
    """Look at the machine. `options` are those that environment variables can set; `host` and `port`: where the server
    would listen."""
    return Facts(
        headway=__version__,
        processor=read_processor(),
        memory=read_memory(),
        cuda=read_cuda(),
        kernels=read_kernels(environment),
        software=read_software(),
        folders=read_folders(),
        network=read_network(environment, host=host, port=port),
        settings=read_settings(environment, options),
    )
