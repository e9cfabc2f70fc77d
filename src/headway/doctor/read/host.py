"""CPU and memory, from what Linux tells in /proc and /sys. Other systems tell less."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from headway.doctor.facts import Memory, Processor
from headway.native.build import cgroup_quota, own_cgroups
from headway.native.shipped import cpu_flags, cpu_lines

_NODES = Path("/sys/devices/system/node")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_SHARED = Path("/dev/shm")


def read_processor() -> Processor:
    """The CPU of this machine."""
    names = [line.partition(":")[2].strip() for line in cpu_lines("model name")]
    num_cores = os.cpu_count() or 1
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(num_cores))
    return Processor(
        name=names[0] if names else platform.processor() or platform.machine(),
        system=platform.system(),
        machine=platform.machine(),
        flags=cpu_flags(),
        num_cores=num_cores,
        num_usable=len(usable),
        quota=cgroup_quota(),
        num_numa_nodes=max(1, num_nodes(usable, (text(path) for path in sorted(_NODES.glob("node*/cpulist"))))),
        governor=text(_GOVERNOR),
        load=os.getloadavg()[0],
    )


def num_nodes(usable: set[int], lists: Iterable[str]) -> int:
    """How many memory nodes have usable cores. Each node lists its cores as "0-3,8"."""
    return sum(not usable.isdisjoint(_cores(one)) for one in lists)


def _cores(listed: str) -> set[int]:
    cores: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def read_memory() -> Memory:
    """The memory of this machine."""
    values = meminfo(text(Path("/proc/meminfo")))
    limit, left = cgroup_memory(own_cgroups())
    shared = os.statvfs(_SHARED) if _SHARED.is_dir() else None
    return Memory(
        total=values.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available=values.get("MemAvailable"),
        limit=limit,
        left_of_limit=left,
        huge_pages=chosen(text(_HUGE_PAGES)),
        refuses_overcommit=text(_OVERCOMMIT) == "2",
        shared_total=None if shared is None else shared.f_frsize * shared.f_blocks,
        shared_free=None if shared is None else shared.f_frsize * shared.f_bavail,
    )


def meminfo(content: str) -> dict[str, int]:
    """The sizes in /proc/meminfo, in bytes."""
    rows = (line.split() for line in content.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2 and row[1].isdigit()}


def cgroup_memory(folders: Iterable[Path]) -> tuple[int | None, int | None]:
    """The tightest limit of cgroups, and the least that is left of one. Cached files do not count, since the kernel
    gives them up."""
    limits: list[int] = []
    left: list[int] = []
    for folder in folders:
        limit = number(text(folder / "memory.max"))
        if limit is None:
            continue
        limits.append(limit)
        used = number(text(folder / "memory.current")) or 0
        rows = (line.split() for line in text(folder / "memory.stat").splitlines())
        cached = next((int(row[1]) for row in rows if row[:1] == ["inactive_file"]), 0)
        left.append(max(0, limit - used + cached))
    return min(limits, default=None), min(left, default=None)


def chosen(choices: str) -> str:
    """The chosen one of "always [madvise] never"."""
    return next((word.strip("[]") for word in choices.split() if word.startswith("[")), "")


def text(path: Path) -> str:
    """A file of the system; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(content: str) -> int | None:
    """A whole number; `None` for any other text, such as "max"."""
    return int(content) if content.isdigit() else None
