"""NVIDIA's driver, and the GPUs that torch sees."""

from __future__ import annotations

import ctypes
import re
import warnings
from pathlib import Path

from headway.doctor.facts import Cuda, Gpu
from headway.doctor.read.host import text

_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")


def read_cuda() -> Cuda:
    """The GPUs of this machine."""
    driver = re.search(r"\d+\.\d+(\.\d+)?", text(_DRIVER))
    known = Cuda(
        driver=driver[0] if driver else "",
        driver_cuda=_driver_cuda(),
        has_devices=any(_DEVICES.glob("nvidia[0-9]*")),
    )
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that torch needs is missing
        return _with_torch(known, None, f"torch cannot be imported ({error})", ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus = _gpus() if torch.cuda.is_available() else ()
    problem = "" if gpus or not caught else str(caught[0].message).splitlines()[0]
    return _with_torch(known, torch.version.cuda, problem, gpus)


def _with_torch(known: Cuda, torch_cuda: str | None, problem: str, gpus: tuple[Gpu, ...]) -> Cuda:
    return Cuda(
        driver=known.driver,
        driver_cuda=known.driver_cuda,
        has_devices=known.has_devices,
        torch_cuda=torch_cuda,
        problem=problem,
        gpus=gpus,
    )


def _gpus() -> tuple[Gpu, ...]:
    import torch

    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        found.append(Gpu(name=name, total=total, free=free, capability=capability))
    return tuple(found)


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver's library supports."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
