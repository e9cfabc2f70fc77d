"""Stop strings in streamed text: found across any cut of the stream, and never shown to the reader by half."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

AUTOMATA_KEPT = 64


class StopChecker:
    """Feeds text through and ends it at the first stop string that is completed.

    What comes out does not depend on how the text was cut into pieces: the stop string whose last character comes first
    wins; of several that end at the same character, the longest. Text that may still become a stop string is held
    back until it is clear that it does not, or until `finish`.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._automaton = _automaton(tuple(stop_strings)) if stop_strings else None
        self._include = include_in_output
        self._state = 0
        self._tail = ""  # the end of the text that begins a stop string: as long as the state is deep
        self.matched: str | None = None
        """The stop string that ended the text, once there is one."""

    def append(self, text: str, *, search: bool = True) -> str:
        """Take the next piece and return the text that is now certain to belong to the output.

        With `search=False` (before `min_tokens` are reached) no stop string is looked for: one counts later only if it
        lies wholly in text that was searched.
        """
        if self.matched is not None or self._automaton is None:
            return "" if self.matched is not None else text
        if not search:
            return self.finish() + text
        buffer = self._tail + text
        released = len(self._tail) if self._include else 0
        num_read, self._state, self.matched = self._automaton.read(text, self._state)
        if self.matched is not None:
            end = len(self._tail) + num_read
            self._tail = ""
            return buffer[released : end if self._include else end - len(self.matched)]
        kept = self._automaton.depth[self._state]
        self._tail = buffer[len(buffer) - kept :]
        return buffer[released:] if self._include else buffer[: len(buffer) - kept]

    def finish(self) -> str:
        """The output ends here for another reason: release what was held back."""
        held, self._tail, self._state = self._tail, "", 0
        return "" if self._include else held


class _Automaton:
    """All stop strings at once, character by character: however many they are and whatever they share, a character
    costs the same. A state stands for the longest end of the text that begins one of them (Aho and Corasick's)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.depth = [0]
        """Of each state: how long that beginning is."""
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the state of the next shorter end that begins one
        self._match: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            self._match[self._add(stop)] = stop
        waiting = deque(self._next[0].values())
        while waiting:  # by depth, so that shorter ends are known
            state = waiting.popleft()
            for character, child in self._next[state].items():
                shorter = self._shorter[child] = self._follow(self._shorter[state], character)
                if self._match[child] is None:
                    self._match[child] = self._match[shorter]
                waiting.append(child)

    def read(self, text: str, state: int) -> tuple[int, int, str | None]:
        """Go on from a state, up to the first stop string. Returns how many characters were read, the state after them,
        and the stop string."""
        for place, character in enumerate(text):
            state = self._follow(state, character)
            if self._match[state] is not None:
                return place + 1, state, self._match[state]
        return len(text), state, None

    def _follow(self, state: int, character: str) -> int:
        while (found := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return found

    def _add(self, stop: str) -> int:
        state = 0
        for depth, character in enumerate(stop, start=1):
            found = self._next[state].get(character)
            if found is None:
                found = self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._match.append(None)
                self.depth.append(depth)
            state = found
        return state


@functools.lru_cache(AUTOMATA_KEPT)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Shared by all completions of a request."""
    return _Automaton(stops)
