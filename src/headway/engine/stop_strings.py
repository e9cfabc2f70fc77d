"""Stop strings in streamed text: found across any cut of the stream, and never shown to the reader by half."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Feeds text through and ends it at the first stop string that is completed.

    What comes out does not depend on how the text was cut into pieces: the stop string whose last character comes first
    wins; of several that end at the same character, the longest. Text that may still become a stop string is held
    back until it is clear that it does not, or until `finish`.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stop_strings)
        self._include = include_in_output
        self._tail = ""
        self.matched: str | None = None
        """The stop string that ended the text, once there is one."""

    def append(self, text: str, *, search: bool = True) -> str:
        """Take the next piece and return the text that is now certain to belong to the output.

        With `search=False` (before `min_tokens` are reached) no stop string is looked for: one counts later only if it
        lies wholly in text that was searched.
        """
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        if not search:
            return self.finish() + text
        buffer = self._tail + text
        released = len(self._tail) if self._include else 0
        match = self._first_match(buffer)
        if match is not None:
            start, self.matched = match
            self._tail = ""
            return buffer[released : start + len(self.matched) if self._include else start]
        kept = self._possible_start(buffer)
        self._tail = buffer[len(buffer) - kept :]
        return buffer[released:] if self._include else buffer[: len(buffer) - kept]

    def finish(self) -> str:
        """The output ends here for another reason: release what was held back."""
        held, self._tail = self._tail, ""
        return "" if self._include else held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
