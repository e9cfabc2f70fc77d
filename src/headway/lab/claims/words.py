"""Numbers as people read them in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence


def times(ratio: float) -> str:
    """2.7×"""
    if not math.isfinite(ratio):
        return "–"
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.3g}×" if ratio >= 10 else f"{ratio:.2f}×"


def percent(share: float, *, signed: bool = False) -> str:
    """61% or, of a change, −34%."""
    if not math.isfinite(share):
        return "–"
    digits = 1 if abs(share) < 0.1 or 0.99 < abs(share) < 1 else 0
    return f"{100 * share:{'+' if signed else ''}.{digits}f}%".replace("-", "−")


def milliseconds(seconds: float) -> str:
    """Of a latency; seconds from ten of them on."""
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def change(new: float, old: float) -> float:
    """-0.34: a third less."""
    return new / old - 1.0 if old else math.nan


def sentences(parts: Sequence[str]) -> str:
    """Those that are there, one after the other."""
    return " ".join(part for part in parts if part)
