"""Where a request's time went if several engines had it one after the other.

    arrival ──queue──► begun ──prefill──► first token ──decode──► end        the first of each counts

An engine knows only what happened there: for a request that goes on, it came anew, and had its first token before its
first step. What happened before is known here.
"""

from __future__ import annotations

import msgspec

from headway.wire.messages import RequestTimings


class RequestPhases:
    """Of one request. All times are of one clock that never goes back."""

    __slots__ = ("_arrival_s", "_begun_s", "_first_token_s", "_has_moved")

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = arrival_s
        self._begun_s: float | None = None
        self._first_token_s: float | None = None
        self._has_moved = False

    def note_begun(self, at_s: float) -> None:
        """An engine has computed something for it."""
        if self._begun_s is None:
            self._begun_s = at_s

    def note_token(self, at_s: float) -> None:
        """A token has come."""
        if self._first_token_s is None:
            self._first_token_s = at_s

    def note_move(self) -> None:
        """It goes on in another engine."""
        self._has_moved = True

    def timings(self, last: RequestTimings, now_s: float) -> RequestTimings:
        """Of a request that ends now; `last` is what its last engine says. None of the phases is below zero, and all
        that happened in the first engine counts."""
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
