"""Measures the phases of a request that several engines had one after the other.

    arrival ──queue──► begun ──prefill──► first token ──decode──► end        the first of each counts

An engine knows only what happened in it: to the engine, a continued request has just arrived and had its first token
before its first step. The earlier times are kept here.
"""

from __future__ import annotations

import msgspec

from headway.wire.messages import RequestTimings


class RequestPhases:
    """The phases of one request. All times are of one monotonic clock."""

    __slots__ = ("_arrival_s", "_begun_s", "_first_token_s", "_has_moved")

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = arrival_s
        self._begun_s: float | None = None
        self._first_token_s: float | None = None
        self._has_moved = False

    def note_begun(self, at_s: float) -> None:
        """Note that an engine has computed something for it."""
        if self._begun_s is None:
            self._begun_s = at_s

    def note_token(self, at_s: float) -> None:
        """Note a token."""
        if self._first_token_s is None:
            self._first_token_s = at_s

    def note_move(self) -> None:
        """Note that the request moves to another engine."""
        self._has_moved = True

    def timings(self, last: RequestTimings, now_s: float) -> RequestTimings:
        """The timings of a request that ends now. `last` are the timings from its last engine. No phase is negative,
        and times in earlier engines are included."""
        if not self._has_moved:
            return last
        first_there_s = now_s - last.decode_s
        begun_there_s = first_there_s - last.prefill_s
        begun_s = _between(self._arrival_s, begun_there_s if self._begun_s is None else self._begun_s, now_s)
        first_s = _between(begun_s, first_there_s if self._first_token_s is None else self._first_token_s, now_s)
        return msgspec.structs.replace(
            last, queue_s=begun_s - self._arrival_s, prefill_s=first_s - begun_s, decode_s=now_s - first_s
        )


def _between(least: float, value: float, most: float) -> float:
    return min(max(least, value), most)
