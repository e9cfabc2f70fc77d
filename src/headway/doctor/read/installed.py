"""Versions, compilers, and kernels that are compiled already."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import shlex
import shutil
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from headway.doctor.facts import Kernels, Software
from headway.errors import NativeBuildError
from headway.installing import install_command
from headway.native.build import ISA_VARIABLE, find_compilers, find_library, load_library

_SHOWN = ("torch", "triton", "huggingface_hub", "llguidance")


def read_software() -> Software:
    """The packages of this environment."""
    try:
        wanted = importlib.metadata.requires("headway") or []
    except importlib.metadata.PackageNotFoundError:  # the source tree alone
        wanted = []
    unmet = dict(unmet_requirements(wanted))
    return Software(
        python=platform.python_version(),
        packages={name: _version(name) for name in _SHOWN},
        unmet=tuple(f"{requirement} ({there})" for requirement, there in unmet.items()),
        mend_unmet=install_command(*unmet) if unmet else "",
    )


def unmet_requirements(wanted: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yields each requirement, but those of extras, that this environment does not meet, and what is there instead."""
    for line in wanted:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name}{requirement.specifier}", "it is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}", f"{version} is installed"


def read_kernels(environment: Mapping[str, str]) -> Kernels:
    """The CPU kernels, and compilers. Nothing is compiled."""
    library = isa = problem = ""
    try:
        found = find_library()
        if found is not None:
            library = "shipped in the package, compiled" if found.is_shipped else "compiled on this machine"
            loaded = load_library(found.path)
            loaded.hw_isa.restype = ctypes.c_char_p
            isa = loaded.hw_isa().decode()
    except (NativeBuildError, OSError, AttributeError) as error:
        problem = f"{error}."
    compiler = shlex.split(environment.get("CC", ""))[:1] or ["gcc"]
    return Kernels(
        library=library,
        isa=isa,
        problem=problem,
        wanted_isa=environment.get(ISA_VARIABLE, ""),
        compilers=tuple(" ".join(one.command) for one in find_compilers()),
        has_python_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        has_triton_compiler=any(shutil.which(name) for name in (*compiler, "gcc", "clang")),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
