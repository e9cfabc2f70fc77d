"""How many replicas there are, where that follows the load."""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ConfigError

SPARE_PART = 0.6


@dataclass
class ScalingRule:
    """How many replicas there are, between `least` and `most`: one more when requests have waited for a seat for
    `up_s`, one less when for `down_s` those that there are would have filled `SPARE_PART` of the seats of one less."""

    least: int
    most: int
    up_s: float = 5.0
    down_s: float = 60.0
    _waiting_s: float = 0.0
    _spare_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"There can be 1 replica or more, and at most as many as max_replicas: {self.least} to {self.most} is "
                "no range."
            )

    def wanted(
        self, *, num_replicas: int, num_running: int, num_waiting: int, max_num_seqs: int, seconds: float
    ) -> int:
        """After `seconds` more, with so many requests and replicas of so many seats each."""
        seats_of_fewer = max_num_seqs * (num_replicas - 1)
        has_spare = num_running + num_waiting <= SPARE_PART * seats_of_fewer
        self._waiting_s = self._waiting_s + seconds if num_waiting else 0.0
        self._spare_s = self._spare_s + seconds if has_spare else 0.0
        if self._waiting_s >= self.up_s and num_replicas < self.most:
            self._waiting_s = self._spare_s = 0.0
            return num_replicas + 1
        if self._spare_s >= self.down_s and num_replicas > self.least:
            self._spare_s = 0.0
            return num_replicas - 1
        return num_replicas
