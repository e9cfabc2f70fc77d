"""Compiles the C sources into one shared library for this machine, once, and caches it, unless the wheel has one.

The file name is a hash of everything the result depends on (sources, flags, compiler, CPU), so a changed source or a
cache directory shared between machines never yields a wrong library. Compiling happens in a private directory and ends
with a rename: two processes at once do the work twice, and both get a complete file. Only a library that this user has
compiled is loaded. If the cache cannot be written, this process uses a temporary folder instead. Anything that makes
the kernels slow, or replaces them, is logged.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from headway.cache_dir import (
    cache_dir,
    is_kept,
    opened_folder,
    opened_private,
    private_folder,
    temporary_folder,
    why_not_writable,
)
from headway.child_process import python_command
from headway.errors import NativeBuildError
from headway.installing import install_command
from headway.native.shipped import SHIPPED_DIR, cpu_identity, find_shipped, sources_hash
from headway.progress import Meter, first_use

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
ISA_VARIABLE = "HEADWAY_NATIVE_ISA"
_CGROUP_ROOT = Path("/sys/fs/cgroup")
COMMON_FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",  # fused multiply-adds only where the source asks for them
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
ZIG_FLAGS = ("-fno-sanitize=undefined",)
"""Without this, zig checks for undefined behaviour."""
_ISA_FLAGS = {
    "generic": ("-DHW_GENERIC",),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mpclmul"),
    "avx512": (
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mpclmul",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512vnni",
    ),
}


@dataclass(frozen=True)
class BuildResult:
    """The library's path, and how it was obtained."""

    path: Path
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    compiled: bool
    """False if it was found in the wheel or in the cache."""

    @property
    def is_shipped(self) -> bool:
        """Whether the library came with the wheel."""
        return self.path.parent == SHIPPED_DIR


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C, and what identifies its version without running it."""

    command: tuple[str, ...]
    identity: str
    is_zig: bool = False


def build(isa: str | None = None, folder: Path | None = None, *, what: str = "the CPU kernels") -> BuildResult:
    """Return the library for `isa` (default $HEADWAY_NATIVE_ISA), compiling it if needed. Without `isa`, it is the one
    that the wheel has for this CPU; if it has none, and for "native", it is compiled for this very machine. `folder`
    has the sources, by default the kernels'; `what` describes them in the progress display."""
    folder = folder or SOURCE_DIR
    found = find_library(isa, folder)
    if found is not None:
        return found
    failures = []
    for compiler in find_compilers():
        flags, name = _name(isa, compiler, folder)
        target, unwritable = _place(name)
        started_s = time.perf_counter()
        once = ": this happens once" if unwritable is None else ""
        try:
            with first_use(f"Compiling {what}{once}.", f"Compiling {what}") as progress:
                compile_library(compiler, flags, folder, target, progress)
        except CompilerFailedError as failure:
            failures.append(str(failure))
            continue
        if unwritable is not None:
            logger.warning(
                "the CPU kernels were compiled in %.1f s for this run alone, and will be again at each start, since "
                "nothing can be written to %s (%s); set HEADWAY_CACHE_DIR to a folder that you can write to",
                time.perf_counter() - started_s,
                cache_dir(),
                unwritable.strerror or unwritable,
            )
        return BuildResult(target, compiler.command, flags, compiled=True)
    remedy = (
        f"Install a C compiler (gcc or clang), or run '{install_command('ziglang')}', which brings one; $CC selects "
        "another."
    )
    if not failures:
        raise NativeBuildError(f"The CPU kernels need a C compiler, and none was found. {remedy}")
    details = "\n".join(failures)
    raise NativeBuildError(f"The CPU kernels could not be compiled. {remedy}\n{details}")


def find_library(isa: str | None = None, folder: Path | None = None) -> BuildResult | None:
    """The library that `build` returns without compiling: the wheel's, or one that was compiled before. `None` if there
    is none."""
    folder = folder or SOURCE_DIR
    isa = isa or os.environ.get(ISA_VARIABLE)
    if isa is None and (shipped := find_shipped(folder)) is not None:
        return BuildResult(shipped, (), (), compiled=False)
    if isa not in (None, "native", *_ISA_FLAGS):
        raise NativeBuildError(f"unknown {ISA_VARIABLE} {isa!r}; valid values are native, {', '.join(_ISA_FLAGS)}")
    for compiler in find_compilers():
        flags, name = _name(isa, compiler, folder)
        target, _ = _place(name)
        if is_kept(target):
            return BuildResult(target, compiler.command, flags, compiled=False)
    return None


def _name(isa: str | None, compiler: Compiler, folder: Path) -> tuple[tuple[str, ...], str]:
    """The flags with which a compiler makes a library, and the library's file name."""
    flags = (*COMMON_FLAGS, *_isa_flags(isa or os.environ.get(ISA_VARIABLE) or "native", compiler))
    return flags, f"headway-native-{_fingerprint(compiler, flags, folder)}.so"


def load_library(path: Path) -> ctypes.CDLL:
    """Load a library that came with the wheel or that this user has compiled. Raises `OSError` for one that another
    user may have put there. A compiled file is opened through its folder, so that the file that was checked is the one
    that is loaded; whoever can write to the wheel's can change the package too."""
    if path.parent == SHIPPED_DIR:
        return ctypes.CDLL(str(path))
    with opened_folder(path.parent) as folder:
        with opened_private(path.name, folder=folder):
            pass
        through = Path(f"/proc/self/fd/{folder}") / path.name
        return ctypes.CDLL(str(through if through.exists() else path))


def _place(name: str) -> tuple[Path, OSError | None]:
    """The path where a library is, or will be made; and the error if that is not in the cache."""
    try:
        target = private_folder(cache_dir()) / name
    except OSError as error:
        return temporary_folder() / name, error
    reason = None if is_kept(target) else why_not_writable(target.parent)
    return (target, None) if reason is None else (temporary_folder() / name, reason)


def find_compilers() -> list[Compiler]:
    """The compilers that exist, in this order: $CC, cc, gcc, clang, then the ziglang wheel."""
    found: list[Compiler] = []
    explicit = shlex.split(os.environ.get("CC", ""))
    for command in (explicit, ["cc"], ["gcc"], ["clang"]):
        path = shutil.which(command[0]) if command else None
        if path is None:
            continue
        real = os.path.realpath(path)
        status = os.stat(real)
        identity = f"{real} {status.st_size} {status.st_mtime_ns}"
        if all(identity != other.identity for other in found):
            is_zig = any("zig" in os.path.basename(part) for part in (real, *command))
            found.append(Compiler((path, *command[1:]), identity, is_zig=is_zig))
    if importlib.util.find_spec("ziglang") is not None:
        version = importlib.metadata.version("ziglang")
        found.append(Compiler(tuple(python_command("ziglang", "cc")), f"ziglang {version}", is_zig=True))
    return found


def _isa_flags(isa: str, compiler: Compiler) -> tuple[str, ...]:
    # zig uses -mcpu for every target
    zig_extra = ZIG_FLAGS if compiler.is_zig else ()
    if isa != "native":
        return (*_ISA_FLAGS[isa], *zig_extra)
    if compiler.is_zig or platform.machine().lower() in ("aarch64", "arm64"):
        return ("-mcpu=native", *zig_extra)
    return ("-march=native",)


def _fingerprint(compiler: Compiler, flags: tuple[str, ...], folder: Path) -> str:
    digest = sources_hash(folder)
    digest.update("\0".join((*flags, *compiler.command, compiler.identity, cpu_identity())).encode())
    return digest.hexdigest()[:20]


class CompilerFailedError(Exception):
    """One compiler did not work; its output is the message."""


def compile_library(compiler: Compiler, flags: tuple[str, ...], folder: Path, target: Path, progress: Meter) -> None:
    """Compile all files of a folder in parallel, one per core, and start with those that take longest. Raises
    `CompilerFailedError`."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as directory:
        sources = sorted(folder.glob("*.c"), key=_effort, reverse=True)
        objects = [f"{directory}/{source.stem}.o" for source in sources]
        commands = [
            [*compiler.command, *flags, "-c", str(source), "-o", output]
            for source, output in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(usable_cpus()) as pool:
            running = {pool.submit(_run, command): _effort(source) for command, source in zip(commands, sources)}
            done, total = 0, sum(map(_effort, sources))
            progress.at(done, total)
            for one in as_completed(running):
                one.result()
                done += running[one]
                progress.at(done, total)
        library = f"{directory}/{target.name}"
        _run([*compiler.command, *flags, "-shared", *objects, "-o", library, "-lm"])
        os.chmod(library, 0o700)
        os.replace(library, target)


def _effort(source: Path) -> int:
    """Roughly how long a file takes to compile. The kernels of quantised weights take most of the time: each is one
    line of source and is unrolled for every number of rows."""
    return 10 if source.stem.startswith("tile_") else 1


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CompilerFailedError(f"{shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        raise CompilerFailedError(f"{shlex.join(command)} exited with {done.returncode}:\n{done.stderr.strip()}")


def usable_cpus() -> int:
    """The number of cores this process may use, at least 1. A quota of 1.5 cores counts as 1, because a second thread
    would be stopped half of the time."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, min(cpus, int(quota)) if quota is not None else cpus)


def cgroup_quota(root: Path = _CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores granted by the tightest cgroup limit (version 2 or 1) above this process, or None."""
    quotas = [_quota_v2(directory) for directory in own_cgroups(root, membership)]
    quotas.append(_quota_v1(root / "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def own_cgroups(root: Path = _CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The folders of this process's cgroup and of those above it (version 2)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return [root]
    for line in lines:
        if line.startswith("0::"):
            own = root / line[3:].strip().lstrip("/")
            return [directory for directory in (own, *own.parents) if directory == root or root in directory.parents]
    return [root]


def _quota_v2(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
