"""What the CPU can do, and how much of it this process may use."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.facts import Facts, Processor
from headway.doctor.findings import Finding, note, ok, warning
from headway.doctor.tuning import BOUNDS

_SUBJECT = "CPU"


def check_processor(facts: Facts) -> Iterator[Finding]:
    """Instruction sets, cores, and what takes them away."""
    cpu = facts.processor
    yield from _instructions(cpu)
    yield from _cores(cpu)
    if cpu.num_numa_nodes > 1:
        yield warning(
            _SUBJECT,
            f"The cores belong to {cpu.num_numa_nodes} memory nodes (NUMA).",
            "A core reads the memory of another node more slowly, and the weights are on one of them.",
            "On the CPU, run one replica per node: 'numactl --cpunodebind=0 --membind=0 headway serve', and so on.",
        )
    if cpu.governor == "powersave":
        yield note(
            _SUBJECT,
            "The frequency governor is 'powersave'.",
            "Cores may run below their highest frequency.",
            "Run 'cpupower frequency-set -g performance'.",
        )
    usable = min(cpu.num_usable, cpu.quota or cpu.num_usable)
    if cpu.load > BOUNDS.busy_share * usable:
        yield warning(
            _SUBJECT,
            f"Other programs are busy: a load of {cpu.load:.1f} on {usable:g} cores.",
            "Every step waits for the slowest core, and measured times mean little.",
            "End them, or give Headway cores of its own ('taskset', a cgroup).",
        )


def _instructions(cpu: Processor) -> Iterator[Finding]:
    if not cpu.flags:
        yield ok(_SUBJECT, f"{cpu.name or cpu.machine}, {cpu.system}.")
    elif {"avx512_vnni", "avx512bw", "avx512vl"} <= cpu.flags or "avx_vnni" in cpu.flags or "asimddp" in cpu.flags:
        yield ok(_SUBJECT, f"{cpu.name or cpu.machine}, with dot products of 8-bit numbers.")
    elif {"avx2", "fma", "f16c"} <= cpu.flags or "asimd" in cpu.flags:
        wanted = "AVX-512 VNNI" if "avx2" in cpu.flags else "the dot product extension"
        yield note(
            _SUBJECT,
            f"{cpu.name or cpu.machine} lacks {wanted}.",
            "Linear layers of 8-bit weights need more instructions than on newer CPUs.",
        )
    else:
        yield warning(
            _SUBJECT,
            f"{cpu.name or cpu.machine} has neither AVX2 nor NEON.",
            "The CPU kernels run without vector instructions, several times as slow.",
            "Use a CPU made since about 2014; in a virtual machine, pass the host's CPU model through.",
        )


def _cores(cpu: Processor) -> Iterator[Finding]:
    if cpu.quota is not None and cpu.quota < 1:
        yield warning(
            _SUBJECT,
            f"A cgroup allows {cpu.quota:g} of a core.",
            "The engine and the HTTP front end are stopped for part of each tenth of a second.",
            "Raise the CPU limit of the container to 2 or more.",
        )
    elif cpu.quota is not None and cpu.quota < cpu.num_usable:
        yield note(
            _SUBJECT,
            f"A cgroup allows {cpu.quota:g} of {cpu.num_usable} cores.",
            f"The kernels run {int(cpu.quota)} threads; a part of a core is not used.",
        )
    elif cpu.num_usable == 1:
        yield note(_SUBJECT, "One core.", "The engine and the HTTP front end take turns on it.")
    elif cpu.num_usable < cpu.num_cores:
        yield note(_SUBJECT, f"This process may run on {cpu.num_usable} of {cpu.num_cores} cores.", "See 'taskset'.")
    else:
        yield ok(_SUBJECT, f"{cpu.num_usable} cores.")
