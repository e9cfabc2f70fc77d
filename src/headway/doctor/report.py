"""Writes findings as text, or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, Level

_INDENT = " " * 9


def is_broken(findings: Sequence[Finding]) -> bool:
    """Whether something is broken."""
    return any(finding.level == Level.ERROR for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """The findings for people; what matters most comes last, next to the prompt."""
    order = list(Level)
    lines: list[str] = []
    for finding in sorted(findings, key=lambda one: order.index(one.level)):
        lines += _wrapped(f"{finding.level:<8} {finding.subject}: {finding.what}", "")
        if finding.why:
            lines += _wrapped(finding.why, _INDENT)
        if finding.mend:
            lines += _wrapped(f"→ {finding.mend}", _INDENT)
    counts = Counter(finding.level for finding in findings)
    named = [f"{counts[level]} {level}{'s' if counts[level] != 1 else ''}" for level in reversed(order[1:])]
    return "\n".join([*lines, "", f"{', '.join(named)}."])


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Everything as one JSON object."""
    document = {
        "ok": not is_broken(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": dataclasses.asdict(facts),
    }
    return json.dumps(document, indent=2, default=_plain)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, 100, initial_indent=indent, subsequent_indent=_INDENT, break_long_words=False)
