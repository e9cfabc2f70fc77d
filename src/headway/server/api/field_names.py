"""Renames fields in errors, because the client may have sent a field under another name than the check knows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.server.api.api_errors import ApiError

_PATH = re.compile(r"(?P<quote>')?(?P<path>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[\d+\])*)")
"""Matches words of a message that may be the path of a field, quoted or not."""
_TOOL = re.compile(r"tools\[(\d+)\]")


class Renaming:
    """Maps the path of a checked field to the path that the client sent, in an error's `param` and message."""

    def __init__(self, *rules: tuple[str, str], tool_places: Sequence[str] = ()) -> None:
        """`rules` are patterns for the beginning of a path, with replacements; the first match counts. If tools were
        left out or unfolded, `tool_places` has the path of each tool in the client's body."""
        self._rules = [(re.compile(rule), name) for rule, name in rules]
        self._given = rules
        self._tool_places = tool_places

    def at(self, tool_places: Sequence[str]) -> Renaming:
        """Return the same rules for a body with tools at these paths."""
        return Renaming(*self._given, tool_places=tool_places)

    def path(self, old: str) -> str:
        """Return the client's path of a field."""
        rule, name = next(((rule, name) for rule, name in self._rules if rule.match(old)), (None, ""))
        new = old if rule is None else rule.sub(name, old, count=1)
        return _TOOL.sub(self._tool_place, new, count=1) if new.startswith("tools[") else new

    def __call__(self, failure: ApiError) -> ApiError:
        """Return the error with the client's field names."""
        if failure.status != 400 or failure.param is None:
            return failure
        param, message = failure.param, str(failure)

        def renamed(found: re.Match[str]) -> str:
            quote, path = found["quote"] or "", found["path"]
            # An ordinary word may also be the name of a field; it counts as one only if it looks like a path.
            is_field = "." in path or "[" in path or "_" in path or (path == param and (quote or found.start() == 0))
            return quote + (self.path(path) if is_field else path)

        return failure.in_other_words(_PATH.sub(renamed, message), param=self.path(param))

    def _tool_place(self, found: re.Match[str]) -> str:
        number = int(found[1])
        return self._tool_places[number] if number < len(self._tool_places) else found[0]
