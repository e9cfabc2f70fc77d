"""Refusals in the client's words: a check knows a field under one name, the client may have sent it under another."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.server.api.api_errors import ApiError

_PATH = re.compile(r"(?P<quote>')?(?P<path>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[\d+\])*)")
"""What may be the path of a field in a message, quoted or not."""
_TOOL = re.compile(r"tools\[(\d+)\]")


class Renaming:
    """From the path of a field where it is checked to the one that the client wrote, in `param` and in the message."""

    def __init__(self, *rules: tuple[str, str], tool_places: Sequence[str] = ()) -> None:
        """Patterns for the beginning of a path, and what stands in its place; the first that matches counts. Where
        tools were left out or unfolded, `tool_places` says where each one stands in the client's body."""
        self._rules = [(re.compile(rule), name) for rule, name in rules]
        self._given = rules
        self._tool_places = tool_places

    def at(self, tool_places: Sequence[str]) -> Renaming:
        """The same rules for a body whose tools stand in these places."""
        return Renaming(*self._given, tool_places=tool_places)

    def path(self, old: str) -> str:
        """The client's path of a field."""
        rule, name = next(((rule, name) for rule, name in self._rules if rule.match(old)), (None, ""))
        new = old if rule is None else rule.sub(name, old, count=1)
        return _TOOL.sub(self._tool_place, new, count=1) if new.startswith("tools[") else new

    def __call__(self, failure: ApiError) -> ApiError:
        """The same refusal in the client's words."""
        if failure.status != 400 or failure.param is None:
            return failure
        param, message = failure.param, str(failure)

        def renamed(found: re.Match[str]) -> str:
            quote, path = found["quote"] or "", found["path"]
            # A word of a sentence may be the name of a field too; it is one where it looks like one.
            is_field = "." in path or "[" in path or "_" in path or (path == param and (quote or found.start() == 0))
            return quote + (self.path(path) if is_field else path)

        return failure.in_other_words(_PATH.sub(renamed, message), param=self.path(param))

    def _tool_place(self, found: re.Match[str]) -> str:
        number = int(found[1])
        return self._tool_places[number] if number < len(self._tool_places) else found[0]
