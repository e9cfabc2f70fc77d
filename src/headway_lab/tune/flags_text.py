"""Options as they are typed on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flags_text(changes: Mapping[str, Any]) -> str:
    """Options as flags of a command line."""
    return " ".join(f"--{name.replace('_', '-')} {_value(value)}" for name, value in changes.items())


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
