"""The machine and the software that something was measured with, for people."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from headway import __version__


def device_name(device: str) -> str:
    """Of a GPU its product name, of a CPU the model and how many cores this process has."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    from headway.native.build import usable_cpus

    num_cores = usable_cpus()
    return f"{_cpu_model()}, {num_cores} core{'s' if num_cores != 1 else ''}"


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import torch

    return {"headway": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
