"""A testbed where claims take moments: the shipped machine, with work as small as on a slow CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway_lab.claims.claim import Chart, Outcome
from headway_lab.claims.claim_results import Row
from headway_lab.claims.context import Context
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.claims.testbed import EngineTestbed, SimulatedTestbed
from tests.lab.bench.test_offline_bench import SHAPE


class SmallTestbed(SimulatedTestbed):
    """Simulated, but lengths and numbers are those of a quick run on a CPU."""

    @property
    def is_cpu(self) -> bool:
        return True


def small_context() -> Context:
    return Context(SmallTestbed.open(), is_quick=True)


def tiny_options(folder: Path) -> dict[str, Any]:
    """Options that choose a tiny model with random weights."""
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    return {"model": str(folder / "tiny.json"), "load_format": "dummy", "dtype": "float32", "num_kv_blocks": 64}


def tiny_testbed(**options: Any) -> EngineTestbed:
    """The real engine, with a model that these options choose."""
    return EngineTestbed(
        lambda **more: LLMEngine.from_config(EngineConfig.from_options(**options, **more)), name="tiny"
    )


def row(name: str = "eras", *, ours: str = "2×", where: str = "engine", trust: str = "") -> Row:
    """Made up."""
    chart = Chart("a title", "tokens/s", bars={"one": 1.0, "two": 2.0})
    outcome = Outcome(2.0, "×", ours, "some work", "why | not", where, chart, {"one": {"tokens/s": 1.0}})  # type: ignore[arg-type]
    return Row(CLAIMS[name], outcome, "a machine", True, 1.5, "2026-01-01", trust)
