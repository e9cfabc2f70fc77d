"""Whether GPUs that are there are used."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.checks.memory import gib
from headway.doctor.facts import Cuda, Facts
from headway.doctor.findings import Finding, error, note, ok, warning
from headway.doctor.tuning import BOUNDS

_SUBJECT = "GPU"
_INDEX = "https://pytorch.org/get-started/locally"
_ON_CPU = "The model runs on the CPU."


def check_gpu(facts: Facts) -> Iterator[Finding]:
    """Driver, torch, and the memory of GPUs."""
    cuda = facts.cuda
    if not cuda.gpus:
        yield from _unused(cuda, visible=facts.settings.variables.get("CUDA_VISIBLE_DEVICES"))
        return
    for number, gpu in enumerate(cuda.gpus):
        if gpu.free < (1 - BOUNDS.taken_share) * gpu.total:
            yield warning(
                _SUBJECT,
                f"Of GPU {number} ({gpu.name}), {gib(gpu.total - gpu.free)} of {gib(gpu.total)} are taken.",
                "By default the engine plans with 0.9 of all memory, and does not start if it is not there.",
                "End what takes it ('nvidia-smi' lists it), or lower --gpu-memory-utilization.",
            )
        else:
            yield ok(_SUBJECT, f"GPU {number}: {gpu.name}, {gib(gpu.total)}.")


def _unused(cuda: Cuda, *, visible: str | None) -> Iterator[Finding]:
    """Why torch sees no GPU."""
    has_gpu = bool(cuda.driver) or cuda.has_devices or cuda.driver_cuda is not None
    if not has_gpu:
        yield ok(_SUBJECT, "No NVIDIA GPU: the model runs on the CPU.")
    elif visible is not None and visible.strip() in ("", "-1"):
        yield note(_SUBJECT, f"CUDA_VISIBLE_DEVICES='{visible}' hides all GPUs.", _ON_CPU, "Unset it to use them.")
    elif cuda.torch_cuda is None:
        yield error(
            _SUBJECT,
            "There is an NVIDIA driver, and torch is the build for CPUs.",
            _ON_CPU,
            f"Install the torch build for CUDA ({_INDEX}).",
        )
    elif cuda.driver_cuda is None:
        yield error(
            _SUBJECT,
            "There is an NVIDIA GPU, and no library of its driver (libcuda.so.1).",
            _ON_CPU,
            "In a container: start it with '--gpus all' and NVIDIA's container toolkit. Else install the driver.",
        )
    elif _version(cuda.torch_cuda) > cuda.driver_cuda:
        newest = ".".join(map(str, cuda.driver_cuda))
        yield error(
            _SUBJECT,
            f"torch is built for CUDA {cuda.torch_cuda}, and the driver supports {newest} at most.",
            _ON_CPU,
            f"Update the driver, or install a torch build for CUDA {newest} ({_INDEX}).",
        )
    elif not cuda.has_devices:
        yield error(
            _SUBJECT,
            "There is an NVIDIA driver, and no GPU is passed to this process (/dev/nvidia0).",
            _ON_CPU,
            "In a container: start it with '--gpus all'. In Kubernetes: ask for the resource nvidia.com/gpu.",
        )
    else:
        yield error(
            _SUBJECT,
            f"torch sees no GPU: {cuda.problem or 'it does not say why'}.",
            _ON_CPU,
            "Run 'nvidia-smi': if it fails too, the driver has to be repaired, often by a restart of the machine.",
        )


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
