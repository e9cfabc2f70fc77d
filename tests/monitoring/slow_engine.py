"""An engine without a model whose steps take a known time, and which computes as little as an idle one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine

FACTORY = f"{__name__}:create_engine"
STEP_VARIABLE = "HEADWAY_DRILL_STEP_S"


def create_engine(options: dict[str, Any]) -> LLMEngine:
    """Build the engine. A step takes as long as the environment says."""
    from headway.engine_process import engine_without_model

    return engine_without_model.create_engine({"step_s": float(os.environ[STEP_VARIABLE]), **options})
