"""Versions of Python and of the packages that Headway needs."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, error, ok

_SUBJECT = "software"


def check_software(facts: Facts) -> Iterator[Finding]:
    """Whether the requirements are met."""
    software = facts.software
    if software.unmet:
        yield error(
            _SUBJECT,
            f"Requirements of Headway are not met: {'; '.join(software.unmet)}.",
            "It has not been tested with other versions, and may fail at any point.",
            f"Run '{software.mend_unmet}'.",
        )
        return
    versions = (f"{name} {version}" for name, version in software.packages.items() if version is not None)
    yield ok(_SUBJECT, f"Headway {facts.headway}, Python {software.python}, {', '.join(versions)}.")
