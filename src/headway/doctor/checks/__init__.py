"""The checks: each looks at the facts about one subject, and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headway.doctor.checks.folders import check_folders
from headway.doctor.checks.gpu import check_gpu
from headway.doctor.checks.kernels import check_kernels
from headway.doctor.checks.memory import check_memory
from headway.doctor.checks.network import check_network
from headway.doctor.checks.processor import check_processor
from headway.doctor.checks.settings import check_settings
from headway.doctor.checks.software import check_software
from headway.doctor.facts import Facts
from headway.doctor.findings import Finding

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_software,
    check_kernels,
    check_processor,
    check_memory,
    check_gpu,
    check_folders,
    check_network,
    check_settings,
)


def find(facts: Facts) -> list[Finding]:
    """All findings about a machine."""
    return [finding for check in CHECKS for finding in check(facts)]
