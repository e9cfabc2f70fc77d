"""How long the process has been there: what a user waits for is counted from its start, imports included."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine

_IMPORTED_AT_S = time.perf_counter()
_START_TIME_FIELD = 19
"""Of /proc/self/stat after the command's name, counted from 0: clock ticks after boot at which the process began."""


@dataclass(frozen=True)
class StartUp:
    """Seconds after the start of the process."""

    ready_s: float
    first_token_s: float

    def __str__(self) -> str:
        return f"ready {self.ready_s:.2f} s, first token {self.first_token_s:.2f} s after process start"


def seconds_since_start() -> float:
    """Since this process began; where the system does not tell, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        started_s = int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED_AT_S


def measure_start_up(engine: LLMEngine) -> StartUp:
    """Call it as soon as the engine is there: one short request gives the first token."""
    ready_s = seconds_since_start()
    engine.add_request("start-up", [0], SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()
    return StartUp(ready_s, seconds_since_start())
