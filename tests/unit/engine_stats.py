"""An engine's numbers by their names alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from headway.wire.engine_stats import EngineStats


def engine_stats(**numbers: Any) -> EngineStats:
    """Each goes to the record that has a number of that name."""
    stats = EngineStats()
    for name, value in numbers.items():
        (owner,) = [part for part in msgspec.structs.astuple(stats) if name in part.__struct_fields__]
        setattr(owner, name, value)
    return stats


def numbers(stats: EngineStats) -> Any:
    """Its counters and gauges as attributes."""
    return SimpleNamespace(**stats.as_dict())
