"""How many cores this process may really use: its affinity mask, capped by the cgroup's CPU quota."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """At least 1; a quota of 1.5 cores counts as 1, since a second thread would be stopped half of the time."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, min(cpus, int(quota)) if quota is not None else cpus)


def cgroup_quota(root: Path = _CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores granted by the tightest cgroup limit (version 2 or 1) above this process, or None."""
    quotas = [_quota_v2(directory) for directory in _own_directories(root, membership)]
    quotas.append(_quota_v1(root / "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _own_directories(root: Path, membership: Path) -> list[Path]:
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
