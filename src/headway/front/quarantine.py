"""Requests that may be what kills engines.

A request that `SUSPECT_DEATHS` engines have had when they died, without a token for it in between, is a suspect. Few
suspects run at a time beside the other requests: half as many after each death, one more with each that gets a token.
A suspect that ran as the only one when `MAX_TRIALS` engines died is guilty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SUSPECT_DEATHS = 2
MAX_TRIALS = 3
MOST_RUNNING = 16
"""Suspects that run at a time, in the beginning."""


@dataclass(slots=True)
class Suspicion:
    """What speaks against a request."""

    num_deaths: int = 0
    """Of engines that had it, since its last token."""
    num_trials: int = 0
    """Of these, those where it was the only suspect."""
    is_running: bool = False
    """Whether an engine has it as a suspect."""


class Quarantine:
    """Decides by request ids; knows no engines."""

    def __init__(self) -> None:
        self._suspicions: dict[str, Suspicion] = {}
        self._num_running = 0
        self._most_running = MOST_RUNNING

    @property
    def suspicions(self) -> Mapping[str, Suspicion]:
        """Of the requests that an engine has died with; empty as a rule."""
        return self._suspicions

    def admits(self, request_id: str) -> bool:
        """Whether a request may be sent to an engine now. A suspect counts as running from then on."""
        suspicion = self._suspicions.get(request_id)
        if suspicion is None or suspicion.num_deaths < SUSPECT_DEATHS:
            return True
        if not suspicion.is_running:
            if self._num_running >= self._most_running:
                return False
            suspicion.is_running = True
            self._num_running += 1
        return True

    def note_death(self, request_ids: Collection[str]) -> None:
        """An engine has died that had these requests."""
        suspicions = [self._suspicions.setdefault(request_id, Suspicion()) for request_id in request_ids]
        tried = [suspicion for suspicion in suspicions if suspicion.is_running]
        for suspicion in suspicions:
            suspicion.num_deaths += 1
            suspicion.is_running = False
        if tried:
            self._num_running -= len(tried)
            self._most_running = max(1, len(tried) // 2)
        if len(tried) == 1:
            tried[0].num_trials += 1

    def is_guilty(self, request_id: str) -> bool:
        """Whether the request is not to be sent to any engine any more."""
        suspicion = self._suspicions.get(request_id)
        return suspicion is not None and suspicion.num_trials >= MAX_TRIALS

    def release(self, request_id: str) -> bool:
        """It got a token, or has ended. Returns whether another suspect may run now."""
        suspicion = self._suspicions.pop(request_id, None)
        if suspicion is None or not suspicion.is_running:
            return False
        self._num_running -= 1
        self._most_running = min(self._most_running + 1, MOST_RUNNING)
        return True
