"""How much memory there is, and how it is given."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.facts import Facts, Memory
from headway.doctor.findings import Finding, note, ok, warning
from headway.doctor.tuning import BOUNDS

_SUBJECT = "memory"


def check_memory(facts: Facts) -> Iterator[Finding]:
    """The host's memory; that of GPUs is another subject."""
    memory = facts.memory
    if memory.usable and memory.usable < BOUNDS.small_memory:
        yield warning(
            _SUBJECT,
            f"{gib(memory.usable)} are left for a new process.",
            "The embedded model takes about 1.3 GB while it serves; larger ones do not fit.",
            "End other programs, or raise the memory limit of the container."
            if memory.limit is not None
            else "End other programs, or use a machine with more memory.",
        )
    else:
        yield ok(_SUBJECT, f"{gib(memory.usable)} of {gib(memory.total)} are free.")
    if memory.limit is not None and memory.limit < memory.total:
        yield note(
            _SUBJECT,
            f"A cgroup limits memory to {gib(memory.limit)}.",
            "A process that needs more is killed. Weights, KV cache and host cache count together.",
            "'headway plan MODEL --memory SIZE' says what fits.",
        )
    if memory.huge_pages == "never":
        yield warning(
            _SUBJECT,
            "Transparent huge pages are off.",
            "A model's many weights are read through small pages, and the CPU waits for their addresses.",
            "As root: 'echo madvise > /sys/kernel/mm/transparent_hugepage/enabled'.",
        )
    if memory.refuses_overcommit:
        yield warning(
            _SUBJECT,
            "The kernel refuses memory that it may not be able to give (vm.overcommit_memory is 2).",
            "torch and CUDA reserve much more than they use, so that a start can fail with memory to spare.",
            "As root: 'sysctl vm.overcommit_memory=0'.",
        )
    yield from _shared(memory, num_gpus=len(facts.cuda.gpus))


def _shared(memory: Memory, *, num_gpus: int) -> Iterator[Finding]:
    subject = "shared memory"
    if memory.shared_total is None:
        yield note(subject, "There is no /dev/shm.", "Ranks (--tensor-parallel-size) share a file on disk instead.")
    elif num_gpus > 1 and memory.shared_total < BOUNDS.small_shared_of_gpus:
        yield warning(
            subject,
            f"/dev/shm has {gib(memory.shared_total)}.",
            "With --tensor-parallel-size over several GPUs, NCCL keeps its buffers there and fails if they do not fit.",
            "Docker: '--shm-size 1g' or '--ipc host'. Kubernetes: an emptyDir of medium Memory at /dev/shm.",
        )
    elif memory.shared_free is not None and memory.shared_free < BOUNDS.small_shared:
        yield warning(
            subject,
            f"/dev/shm has {gib(memory.shared_free)} free.",
            "Ranks on the CPU (--tensor-parallel-size) exchange numbers there, 2 MiB for each.",
            "Remove old files in /dev/shm, or make it larger (Docker: '--shm-size 1g').",
        )
    else:
        yield ok(subject, f"/dev/shm has {gib(memory.shared_total)}.")


def gib(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:,.0f} MiB"
