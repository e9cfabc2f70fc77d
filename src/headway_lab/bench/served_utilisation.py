"""How well a server used its devices during a load, from the counters in its Prometheus metrics."""

from __future__ import annotations

import typing

from headway.core.utilisation import UNKNOWN, Utilisation, UtilisationStats

_METRICS = {
    f"{hint.__metadata__[0].metric}_total": name
    for name, hint in typing.get_type_hints(UtilisationStats, include_extras=True).items()
    if hint.__metadata__[0].metric
}
"""The counters' names in the metrics, without a prefix, and their fields."""


def read_counters(text: str) -> UtilisationStats | None:
    """The counters in the metrics' text; `None` for a server that has none."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            field = _METRICS.get(name.partition("{")[0].rpartition(":")[2])
            if field is not None:
                found[field] = found.get(field, 0.0) + float(value)
    return UtilisationStats(**found) if "device_busy_s" in found else None  # type: ignore[arg-type]


class ServerCounters:
    """The first and the latest counters that were read."""

    def __init__(self) -> None:
        self._first: UtilisationStats | None = None
        self._last: UtilisationStats | None = None

    def read(self, text: str) -> None:
        """Read the metrics' text."""
        found = read_counters(text)
        self._first = self._first or found
        self._last = found or self._last

    @property
    def utilisation(self) -> Utilisation:
        """The shares between the two."""
        if self._first is None or self._last is None:
            return UNKNOWN
        return Utilisation.of(self._last.since(self._first))
