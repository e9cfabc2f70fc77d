"""Libraries that a wheel brings with it, compiled for common instruction sets: the first start compiles nothing.

A wheel for one platform has them in `compiled/`. A clone, a source distribution and the wheel for any platform have
none, and the first start compiles. A library's name has a digest of the sources that it was compiled from, so one of
other sources is never found.

    headway-csrc-0123456789abcdef-avx2.so      csrc, the digest of its C files, the instruction set
"""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

SHIPPED_DIR = Path(__file__).parent / "compiled"
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class InstructionSet:
    """A set of instructions that libraries are compiled for in advance."""

    name: str
    """As the compiled library calls it."""
    machine: str
    """The processor's family, as zig calls it."""
    zig_cpu: str
    """The value of zig's -mcpu."""
    needs: frozenset[str]
    """What Linux lists in /proc/cpuinfo for a CPU that has these instructions."""


def _x86(name: str, extra_zig: str, needs: str) -> InstructionSet:
    return InstructionSet(name, "x86_64", extra_zig, frozenset(needs.split()))


_AVX2 = "avx2 bmi1 bmi2 f16c fma abm movbe pclmulqdq"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"

INSTRUCTION_SETS = (
    _x86("avx512-vnni", "x86_64_v4+pclmul+avx512vnni", f"{_AVX512} avx512_vnni"),
    _x86("avx512", "x86_64_v4+pclmul", _AVX512),
    _x86("avx2-vnni", "x86_64_v3+pclmul+avxvnni", f"{_AVX2} avx_vnni"),
    _x86("avx2", "x86_64_v3+pclmul", _AVX2),
    InstructionSet("neon-dotprod", "aarch64", "generic+crc+lse+dotprod", frozenset({"asimddp", "crc32", "atomics"})),
    InstructionSet("neon", "aarch64", "generic+crc", frozenset({"asimd", "crc32"})),
)
"""The fastest of each family first."""


def find_shipped(folder: Path) -> Path | None:
    """The shipped library of the sources in this folder that is fastest on this CPU; `None` if there is none."""
    if not SHIPPED_DIR.is_dir():
        return None
    digest, flags = sources_hash(folder).hexdigest(), cpu_flags()
    for one in INSTRUCTION_SETS:
        path = SHIPPED_DIR / shipped_name(folder, digest, one)
        if path.is_file() and (one.needs <= flags or sys.platform == "darwin"):
            return path
    return None


def shipped_name(folder: Path, digest: str, instructions: InstructionSet) -> str:
    """The file name of the library of this folder's sources for these instructions."""
    return f"headway-{folder.name}-{digest[:16]}-{instructions.name}.so"


def sources_hash(folder: Path) -> hashlib._Hash:
    """A hash that all C files in this folder have gone into."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest


def cpu_flags() -> frozenset[str]:
    """The first core's features as Linux lists them; empty on other systems."""
    return frozenset(word for line in cpu_lines("flags", "Features") for word in line.partition(":")[2].split())


def cpu_lines(*names: str) -> list[str]:
    """The lines of /proc/cpuinfo about the first core that begin with one of these names."""
    try:
        first_core = _CPU_INFO.read_text().split("\n\n")[0]
    except OSError:
        return []
    return [line for line in first_core.splitlines() if line.startswith(names)]


def cpu_identity() -> str:
    """The architecture and the first core's features; the processor's name if the system lists no features."""
    lines = cpu_lines("flags", "Features", "model name", "CPU part")
    if not lines:
        return f"{platform.system()} {platform.machine()} {platform.processor()}"
    return platform.machine() + "\n".join(lines)
