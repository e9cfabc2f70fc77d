"""Limits requests that may be the cause of engine crashes.

A request is a suspect if `SUSPECT_DEATHS` engines have died while they had it, without a token for it in between. The
number of suspects that run at a time is limited: the limit halves after each death, and grows by one with each suspect
that gets a token. A suspect is guilty if it was the only running one when `MAX_TRIALS` engines died.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SUSPECT_DEATHS = 2
MAX_TRIALS = 3
MOST_RUNNING = 16
"""The initial and largest number of suspects that run at a time."""


@dataclass(slots=True)
class Suspicion:
    """The evidence against a request."""

    num_deaths: int = 0
    """Deaths of engines that had it, since its last token."""
    num_trials: int = 0
    """Deaths among these where it was the only running suspect."""
    is_running: bool = False
    """Whether it runs as a suspect."""


class Quarantine:
    """Decides which requests may run. It knows requests by id, and no engines."""

    def __init__(self) -> None:
        self._suspicions: dict[str, Suspicion] = {}
        self._num_running = 0
        self._most_running = MOST_RUNNING

    @property
    def suspicions(self) -> Mapping[str, Suspicion]:
        """Suspicions by id, for requests that an engine had when it died. Usually empty."""
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
        """Note the death of an engine that had these requests."""
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
        """Whether the request must not be sent to any engine again."""
        suspicion = self._suspicions.get(request_id)
        return suspicion is not None and suspicion.num_trials >= MAX_TRIALS

    def release(self, request_id: str) -> bool:
        """Clear a request that got a token or has ended. Returns whether another suspect may run now."""
        suspicion = self._suspicions.pop(request_id, None)
        if suspicion is None or not suspicion.is_running:
            return False
        self._num_running -= 1
        self._most_running = min(self._most_running + 1, MOST_RUNNING)
        return True
