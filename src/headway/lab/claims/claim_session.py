"""Measuring claims one after the other: the engine is loaded once, when the first claim needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from headway.errors import ConfigError
from headway.lab.bench.environment import versions
from headway.lab.claims.claim_results import Row
from headway.lab.claims.context import Bar, Claim, Context, no_bar
from headway.lab.claims.testbed import EngineTestbed, Load, SimulatedTestbed, Testbed

On = Literal["auto", "engine", "simulator", "both"]
"""both: where auto puts it, and in the simulator as well."""


@dataclass
class Session:
    load: Load
    model_name: str
    has_gpu: bool
    calibration: str | None = None
    is_quick: bool = False
    on: On = "auto"
    data_dir: Path | None = None
    flags: str = ""
    """Of the command, as people would type them again."""
    bar: Bar = no_bar
    say: Callable[[str], object] = lambda text: None

    def __post_init__(self) -> None:
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise ConfigError(f"There is no data directory '{self.data_dir}'.")
        self._engine: EngineTestbed | None = None
        self._simulated: SimulatedTestbed | None = None
        self._shared: dict[Any, Any] = {}

    def measure(self, claim: Claim) -> list[Row]:
        """One claim, where it is best measured or where it is asked for."""
        return [self._measure(claim, testbed) for testbed in self._testbeds(claim)]

    def _measure(self, claim: Claim, testbed: Testbed) -> Row:
        context = Context(
            testbed,
            is_quick=self.is_quick,
            data_dir=self.data_dir,
            bar=self.bar,
            say=lambda text: self.say(f"{claim.id}: {text}"),
            shared=self._shared,
        )
        started = time.perf_counter()
        outcome = claim.measure(context)
        on = testbed.description if outcome.where != "scheduler" else "the scheduler alone, on this host"
        return Row(
            claim,
            outcome,
            on,
            self.is_quick,
            time.perf_counter() - started,
            date.today().isoformat(),
            trust=testbed.trust if outcome.where == "simulator" else "",
            flags=self.flags,
            versions=versions(),
        )

    def close(self) -> None:
        """Give back the engine's memory."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _testbeds(self, claim: Claim) -> list[Testbed]:
        if not self._is_on_engine(claim):
            return [self._simulated_testbed()]
        return [self._engine_testbed(), self._simulated_testbed()] if self.on == "both" else [self._engine_testbed()]

    def _is_on_engine(self, claim: Claim) -> bool:
        if claim.engine == "never" or self.on == "simulator":
            return False
        if self.on == "engine" or claim.engine == "always":
            return True
        return claim.engine == "gpu" and self.has_gpu and not self.is_quick

    def _engine_testbed(self) -> EngineTestbed:
        if self._engine is None:
            self.say(f"loading {self.model_name}")
            self._engine = EngineTestbed(self.load, name=self.model_name)
        return self._engine

    def _simulated_testbed(self) -> SimulatedTestbed:
        if self._simulated is None:
            self._simulated = SimulatedTestbed.open(self.calibration)
        return self._simulated


def measure_all(session: Session, claims: Sequence[Claim], each: Callable[[Row], object]) -> None:
    """In this order; `each` hears of every row as soon as it is there."""
    try:
        for claim in claims:
            for row in session.measure(claim):
                each(row)
    finally:
        session.close()
