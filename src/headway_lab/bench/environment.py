"""The machine and the software of a measurement, and the age of this process, imports included."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway import __version__
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine


_IMPORTED_AT_S = time.perf_counter()
_START_TIME_FIELD = 19
"""The field of /proc/self/stat after the command's name, counted from 0, with the clock ticks after boot at which the
process began."""


def device_name(device: str) -> str:
    """The product name of a GPU, or the model of a CPU and how many cores this process has."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    from headway.native.build import usable_cpus

    num_cores = usable_cpus()
    return f"{_cpu_model()}, {num_cores} core{'s' if num_cores != 1 else ''}"


def versions() -> dict[str, str]:
    """The versions of the software that the numbers depend on."""
    import torch

    return {"headway": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True)
class StartUp:
    """Times in seconds after the start of the process."""

    ready_s: float
    first_token_s: float

    def __str__(self) -> str:
        return f"ready {self.ready_s:.2f} s, first token {self.first_token_s:.2f} s after process start"


def seconds_since_start() -> float:
    """Seconds since this process began; if the system does not report that, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        started_s = int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED_AT_S


def measure_start_up(engine: LLMEngine) -> StartUp:
    """Measure the times of a start. Call it as soon as the engine is ready: one short request gives the first token."""
    ready_s = seconds_since_start()
    engine.add_request("start-up", [0], SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()
    return StartUp(ready_s, seconds_since_start())
