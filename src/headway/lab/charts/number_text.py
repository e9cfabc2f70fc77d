"""Numbers as people read them: thousands separated, no more digits than say something."""

from __future__ import annotations

import math

MINUS = "−"
_MILLION = 1_000_000.0


def number_text(value: float) -> str:
    """About four digits: 1,234,567 · 12.35 · 0.001235."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        text = f"{value:.3g}"
    elif size >= 1_000 or float(value).is_integer():
        text = f"{value:,.0f}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", MINUS) if value < 0 else text


def tick_texts(values: list[float], step: float) -> list[str]:
    """Labels of evenly spaced ticks: all with as many decimals as their step needs, millions as M."""
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e12 or step < 1e-6:
        return [_signed(f"{value:g}") for value in values]
    unit, suffix = (_MILLION, "M") if largest >= _MILLION else (1.0, "")
    decimals = _num_decimals(step / unit)
    return [_signed(f"{value / unit:,.{decimals}f}{suffix}") if value else "0" for value in values]


def log_tick_text(value: float) -> str:
    """The label of one tick of a logarithmic axis."""
    if 1e6 <= value < 1e12:
        return f"{value / _MILLION:,g}M"
    if 1e-4 <= value < 1e6:
        return f"{value:,.10g}"
    return f"{value:g}"


def _num_decimals(step: float) -> int:
    for decimals in range(12):
        if math.isclose(step * 10**decimals, round(step * 10**decimals), rel_tol=1e-9):
            return decimals
    return 12


def _signed(text: str) -> str:
    return text.replace("-", MINUS)
