"""What every record that clients write has in common: unknown fields, and fields that ask for too much, are refused."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from headway.server.api.api_errors import bad_request
from headway.structured.conversation import MAX_NESTING, is_too_deep


class ApiRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A record that clients write. JSON has no cycles, so the garbage collector need not look at it."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported → the values that ask for nothing."""
    REPLACED: ClassVar[dict[str, str]] = {}
    """Fields of older APIs, which may say nothing → the field that says the same."""

    def check_supported(self, path: str = "") -> None:
        """Refuse a field that asks for something this server does not do."""
        for name, neutral in self.NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise _unsupported(f"{path}{name}")
        for name, replacement in self.REPLACED.items():
            if getattr(self, name) not in (None, [], "none"):
                raise _unsupported(f"{path}{name}", f" Send '{path}{replacement}'.")


def _unsupported(field: str, hint: str = "") -> Exception:
    return bad_request(f"'{field}' is not supported by this server.{hint}", param=field, code="unsupported_field")


def check_nesting(value: dict[str, Any], path: str) -> None:
    """Refuse JSON that is too deep."""
    if is_too_deep(value):
        raise bad_request(f"'{path}' is nested more than {MAX_NESTING} levels deep.", param=path)
