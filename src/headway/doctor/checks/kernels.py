"""Which kernels compute, and what they need."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, error, note, ok, warning
from headway.doctor.tuning import BOUNDS

_ON_CPU, _ON_GPU = "CPU kernels", "GPU kernels"
_SLOW = "torch takes the place of the CPU kernels, several times as slow, and weights are not quantised."
_GET_COMPILER = "Install gcc or clang, or run 'pip install ziglang', which brings a compiler."


def check_kernels(facts: Facts) -> Iterator[Finding]:
    """The CPU's kernels, and those of GPUs if there are some."""
    yield from _on_cpu(facts)
    if facts.cuda.gpus:
        yield from _on_gpu(facts)


def _on_cpu(facts: Facts) -> Iterator[Finding]:
    kernels = facts.kernels
    if kernels.problem:
        yield error(
            _ON_CPU,
            f"The CPU kernels cannot be used: {kernels.problem}",
            _SLOW,
            "Repair what the message says, then run 'python -m headway.native', which shows the compiler's own words.",
        )
    elif kernels.library:
        yield ok(_ON_CPU, f"{kernels.library.capitalize()} for {kernels.isa}.")
    elif kernels.compilers:
        yield note(
            _ON_CPU,
            f"Not compiled yet; {kernels.compilers[0]} will compile them.",
            "The first start takes about a minute longer.",
            "To compile them now, run 'python -m headway.native'.",
        )
    else:
        yield warning(_ON_CPU, "There is no compiled library, and no C compiler to make one.", _SLOW, _GET_COMPILER)
    if kernels.wanted_isa and not kernels.problem and kernels.wanted_isa != "native":
        yield warning(
            _ON_CPU,
            f"HEADWAY_NATIVE_ISA is {kernels.wanted_isa}.",
            "The kernels use only these instructions, even if the CPU has faster ones.",
            "Unset HEADWAY_NATIVE_ISA, unless this is a comparison.",
        )


def _on_gpu(facts: Facts) -> Iterator[Finding]:
    kernels, triton = facts.kernels, facts.software.packages.get("triton")
    if triton is None:
        yield error(
            _ON_GPU,
            "The package triton is not installed.",
            "torch takes the place of the GPU kernels, several times as slow.",
            "Install the torch of the CUDA index, which brings triton, or run 'pip install triton'.",
        )
        return
    problems = False
    for is_there, what, mend in (
        (kernels.has_triton_compiler, "finds no C compiler (gcc, clang or $CC)", "Install gcc, or set CC."),
        (
            kernels.has_python_headers,
            "does not find Python's header files (Python.h)",
            "Install them (Debian, Ubuntu: apt install python3-dev).",
        ),
    ):
        if not is_there:
            problems = True
            yield error(
                _ON_GPU,
                f"Triton {what}.",
                "It compiles a small C module before the first kernel runs, and the engine ends if that fails.",
                mend,
            )
    old = [gpu for gpu in facts.cuda.gpus if gpu.capability < BOUNDS.oldest_capability]
    if old:
        yield warning(
            _ON_GPU,
            f"{old[0].name} has compute capability {'.'.join(map(str, old[0].capability))}.",
            "GPUs older than 8.0 (Ampere) have no bfloat16, and Headway was never measured on them.",
            "Use '--dtype float16', or a newer GPU.",
        )
    if not problems:
        yield ok(_ON_GPU, f"Triton {triton} for {facts.cuda.gpus[0].name}.")
