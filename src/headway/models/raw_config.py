"""Typed, checked access to a configuration somebody else wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import CorruptModelError

_REQUIRED: Any = object()


class RawConfig:
    """A mapping whose getters raise `CorruptModelError` naming the file, the key and what is wrong with it."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, value, "a positive integer")
        return value

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """A positive integer, or None where the file says null (or lacks the key and `default` is None)."""
        if key in self.values and self.values[key] is None:
            return None
        return None if default is None and key not in self.values else self.integer(key, default or 0)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None) -> str | None:
        value = self._get(key, default)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def section(self, key: str) -> RawConfig | None:
        """A nested object, or None where it is absent, null or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return RawConfig(value, f"{self.source}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CorruptModelError(f"{self.source} does not say {key!r}")
        return default

    def _wrong(self, key: str, value: Any, wanted: str) -> CorruptModelError:
        return CorruptModelError(f"{self.source}: {key!r} is {value!r}, which is not {wanted}")
