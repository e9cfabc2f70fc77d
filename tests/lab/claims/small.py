"""A testbed where claims take moments: the shipped machine, with work as small as on a slow CPU."""

from __future__ import annotations

from headway_lab.claims.claim import Chart, Outcome
from headway_lab.claims.claim_results import Row
from headway_lab.claims.context import Context
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.claims.testbed import SimulatedTestbed


class SmallTestbed(SimulatedTestbed):
    """Simulated, but lengths and numbers are those of a quick run on a CPU."""

    @property
    def is_cpu(self) -> bool:
        return True


def small_context() -> Context:
    return Context(SmallTestbed.open(), is_quick=True)


def row(name: str = "eras", *, ours: str = "2×", where: str = "engine", trust: str = "") -> Row:
    """Made up."""
    chart = Chart("a title", "tokens/s", bars={"one": 1.0, "two": 2.0})
    outcome = Outcome(2.0, "×", ours, "some work", "why | not", where, chart, {"one": {"tokens/s": 1.0}})  # type: ignore[arg-type]
    return Row(CLAIMS[name], outcome, "a machine", True, 1.5, "2026-01-01", trust)
