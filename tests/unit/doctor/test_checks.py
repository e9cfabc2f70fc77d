"""What the doctor finds on machines that are made up, one table for all checks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from headway.config import EngineConfig
from headway.doctor.checks import find
from headway.doctor.checks.model import check_model
from headway.doctor.facts import Cuda, Facts, Folder, Gpu, Kernels, Memory, Processor, Settings, Software
from headway.doctor.findings import Finding, Level
from headway.doctor.report import as_json, as_text, is_broken
from headway.worker.memory_needs import Needs

GIB = 2**30
H200 = Gpu(name="H200", total=140 * GIB, free=139 * GIB, capability=(9, 0))
HEALTHY = Facts(
    headway="1.0",
    processor=Processor(
        name="Xeon",
        flags=frozenset({"avx2", "avx512_vnni", "avx512bw", "avx512vl"}),
        num_cores=8,
        num_usable=8,
        load=0.5,
    ),
    memory=Memory(total=32 * GIB, available=30 * GIB, huge_pages="madvise", shared_total=GIB, shared_free=GIB),
    kernels=Kernels(
        library="compiled", isa="avx512-vnni", compilers=("gcc",), has_python_headers=True, has_triton_compiler=True
    ),
    software=Software(python="3.12", packages={"torch": "2.13", "triton": "3.9"}),
    folders=(Folder(purpose="models", path="/cache", variable="HF_HOME", free=100 * GIB),),
    settings=Settings(open_files=(1024, 65536), clock_s=2e9, built_s=1.9e9),
)
WITH_GPU = dataclasses.replace(
    HEALTHY, cuda=Cuda(driver="580.1", driver_cuda=(13, 0), has_devices=True, torch_cuda="13.0", gpus=(H200,))
)


def changed(part: str, base: Facts = HEALTHY, **facts: Any) -> Facts:
    """A machine of which some facts are others."""
    return dataclasses.replace(base, **{part: dataclasses.replace(getattr(base, part), **facts)})


def variables(base: Facts = HEALTHY, **given: str) -> Facts:
    return changed("settings", base, variables=given)


CPU, GPU, MEMORY, KERNELS, SETTINGS = "processor", "cuda", "memory", "kernels", "settings"
TWO_GPUS = changed(GPU, WITH_GPU, gpus=(H200, H200))
UNSEEN = changed(GPU, WITH_GPU, gpus=(), problem="CUDA unknown error\nmore")
FOLDER = HEALTHY.folders[0]

CASES: list[tuple[Facts, Level, str]] = [
    # the CPU and its kernels
    (HEALTHY, Level.OK, "Compiled for avx512-vnni."),
    (HEALTHY, Level.OK, "Xeon, with dot products of 8-bit numbers."),
    (HEALTHY, Level.OK, "8 cores."),
    (changed(CPU, flags=frozenset({"asimd", "asimddp"})), Level.OK, "with dot products"),
    (changed(CPU, flags=frozenset(), system="Darwin"), Level.OK, "Xeon, Darwin."),
    (changed(CPU, flags=frozenset({"avx2", "fma", "f16c"})), Level.NOTE, "lacks AVX-512 VNNI"),
    (changed(CPU, flags=frozenset({"asimd"})), Level.NOTE, "lacks the dot product extension"),
    (changed(CPU, flags=frozenset({"sse2"})), Level.WARNING, "has neither AVX2 nor NEON"),
    (changed(CPU, quota=0.5), Level.WARNING, "A cgroup allows 0.5 of a core"),
    (changed(CPU, quota=1.5), Level.NOTE, "A cgroup allows 1.5 of 8 cores"),
    (changed(CPU, num_usable=1, num_cores=1), Level.NOTE, "One core"),
    (changed(CPU, num_usable=4), Level.NOTE, "may run on 4 of 8 cores"),
    (changed(CPU, num_numa_nodes=2), Level.WARNING, "2 memory nodes"),
    (changed(CPU, governor="powersave"), Level.NOTE, "powersave"),
    (changed(CPU, load=5.0), Level.WARNING, "a load of 5.0 on 8 cores"),
    (changed(CPU, load=1.0, quota=1.5), Level.WARNING, "a load of 1.0 on 1.5 cores"),
    (changed(KERNELS, library=""), Level.NOTE, "Not compiled yet; gcc will compile them"),
    (changed(KERNELS, library="", compilers=()), Level.WARNING, "no C compiler to make one"),
    (changed(KERNELS, library="", problem="unknown instructions."), Level.ERROR, "unknown instructions."),
    (changed(KERNELS, wanted_isa="generic"), Level.WARNING, "HEADWAY_NATIVE_ISA is generic"),
    # memory
    (HEALTHY, Level.OK, "30.0 GiB of 32.0 GiB are free"),
    (changed(MEMORY, available=GIB), Level.WARNING, "1.0 GiB are left for a new process"),
    (changed(MEMORY, limit=4 * GIB, left_of_limit=GIB), Level.WARNING, "1.0 GiB are left for a new process"),
    (changed(MEMORY, limit=4 * GIB, left_of_limit=4 * GIB), Level.NOTE, "A cgroup limits memory to 4.0 GiB"),
    (changed(MEMORY, huge_pages="never"), Level.WARNING, "Transparent huge pages are off"),
    (changed(MEMORY, refuses_overcommit=True), Level.WARNING, "vm.overcommit_memory is 2"),
    (changed(MEMORY, shared_total=None, shared_free=None), Level.NOTE, "There is no /dev/shm"),
    (changed(MEMORY, shared_free=2**20), Level.WARNING, "/dev/shm has 1 MiB free"),
    (changed(MEMORY, TWO_GPUS, shared_total=64 * 2**20), Level.WARNING, "/dev/shm has 64 MiB"),
    # GPUs
    (HEALTHY, Level.OK, "No NVIDIA GPU"),
    (WITH_GPU, Level.OK, "GPU 0: H200, 140.0 GiB."),
    (WITH_GPU, Level.OK, "Triton 3.9 for H200."),
    (
        changed(GPU, WITH_GPU, gpus=(dataclasses.replace(H200, free=70 * GIB),)),
        Level.WARNING,
        "Of GPU 0 (H200), 70.0 GiB of 140.0 GiB are taken",
    ),
    (changed("software", WITH_GPU, packages={}), Level.ERROR, "The package triton is not installed"),
    (changed(KERNELS, WITH_GPU, has_triton_compiler=False), Level.ERROR, "Triton finds no C compiler"),
    (changed(KERNELS, WITH_GPU, has_python_headers=False), Level.ERROR, "Python.h"),
    (
        changed(GPU, WITH_GPU, gpus=(dataclasses.replace(H200, name="V100", capability=(7, 0)),)),
        Level.WARNING,
        "V100 has compute capability 7.0",
    ),
    (changed(GPU, UNSEEN, torch_cuda=None), Level.ERROR, "torch is the build for CPUs"),
    (changed(GPU, UNSEEN, driver_cuda=None), Level.ERROR, "no library of its driver"),
    (
        changed(GPU, UNSEEN, driver_cuda=(12, 8)),
        Level.ERROR,
        "built for CUDA 13.0, and the driver supports 12.8 at most",
    ),
    (changed(GPU, UNSEEN, has_devices=False), Level.ERROR, "no GPU is passed to this process"),
    (UNSEEN, Level.ERROR, "torch sees no GPU: CUDA unknown error"),
    (variables(UNSEEN, CUDA_VISIBLE_DEVICES=""), Level.NOTE, "hides all GPUs"),
    # software, folders, network
    (HEALTHY, Level.OK, "Headway 1.0, Python 3.12, torch 2.13, triton 3.9."),
    (
        changed("software", unmet=("torch>=2.11 (2.0 is installed)",), mend_unmet="pip install 'torch>=2.11'"),
        Level.ERROR,
        "torch>=2.11 (2.0 is installed)",
    ),
    (HEALTHY, Level.OK, "Models: /cache, 100.0 GiB free."),
    (
        dataclasses.replace(HEALTHY, folders=(dataclasses.replace(FOLDER, problem="Read-only file system"),)),
        Level.WARNING,
        "/cache, cannot be written to: Read-only file system",
    ),
    (dataclasses.replace(HEALTHY, folders=(dataclasses.replace(FOLDER, is_noexec=True),)), Level.WARNING, "noexec"),
    (dataclasses.replace(HEALTHY, folders=(dataclasses.replace(FOLDER, free=GIB),)), Level.WARNING, "has 1.0 GiB free"),
    (HEALTHY, Level.OK, "Port 8000 on 127.0.0.1 is free"),
    (changed("network", port=80, port_problem="Permission denied"), Level.WARNING, "port 80: Permission denied"),
    (changed("network", proxies={"HTTP_PROXY": "http://p"}), Level.WARNING, "A proxy is set (HTTP_PROXY=http://p)"),
    # the environment
    (HEALTHY, Level.OK, "No variable, limit or clock that needs attention"),
    (changed(SETTINGS, unknown={"HEADWAY_PROT": "HEADWAY_PROT has no meaning."}), Level.WARNING, "has no meaning"),
    (changed(SETTINGS, problem="$HEADWAY_PORT: 'x' is no number"), Level.ERROR, "$HEADWAY_PORT: 'x'"),
    (variables(HF_HUB_OFFLINE="1"), Level.NOTE, "HF_HUB_OFFLINE is set"),
    (variables(OMP_PROC_BIND="close"), Level.WARNING, "OMP_PROC_BIND is close"),
    (variables(GOMP_CPU_AFFINITY="0-3"), Level.WARNING, "GOMP_CPU_AFFINITY is 0-3"),
    (variables(OMP_NUM_THREADS="16"), Level.WARNING, "OMP_NUM_THREADS is 16, and there are 8 cores"),
    (variables(OMP_NUM_THREADS="2,1"), Level.NOTE, "OMP_NUM_THREADS is 2"),
    (variables(OMP_WAIT_POLICY="ACTIVE"), Level.WARNING, "OMP_WAIT_POLICY is active"),
    (variables(TRITON_INTERPRET="1"), Level.ERROR, "TRITON_INTERPRET is 1"),
    (variables(WITH_GPU, CUDA_LAUNCH_BLOCKING="1"), Level.WARNING, "CUDA_LAUNCH_BLOCKING is 1"),
    (changed(SETTINGS, open_files=(1024, 1024)), Level.WARNING, "At most 1,024 files may be open"),
    (changed(SETTINGS, clock_s=0.0), Level.ERROR, "The clock is earlier"),
]


@pytest.mark.parametrize(("facts", "level", "what"), CASES, ids=[case[2][:40] for case in CASES])
def test_findings(facts: Facts, level: Level, what: str) -> None:
    findings = find(facts)
    [found] = [finding for finding in findings if what in finding.what]
    assert found.level == level
    assert is_broken(findings) == any(finding.level == Level.ERROR for finding in findings)
    for finding in findings:
        if finding.level in (Level.WARNING, Level.ERROR):
            assert finding.why and finding.mend, finding


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        WITH_GPU,
        TWO_GPUS,
        variables(OMP_PROC_BIND="false", OMP_NUM_THREADS="8", HF_HUB_OFFLINE="0", CUDA_LAUNCH_BLOCKING="1"),
        changed("network", proxies={"HTTP_PROXY": "http://p"}, no_proxy="example.org, localhost"),
        changed("network", proxies={"HTTP_PROXY": "http://p"}, no_proxy="*"),
        changed(SETTINGS, open_files=(1024, -1)),
        changed(KERNELS, wanted_isa="native"),
    ],
)
def test_nothing_to_mend(facts: Facts) -> None:
    assert {finding.level for finding in find(facts)} == {Level.OK}


def test_nothing_is_known() -> None:
    """A system that tells nothing of itself is no error."""
    assert not is_broken(find(dataclasses.replace(Facts(), settings=Settings(clock_s=2e9))))


NEEDS = Needs(
    on_cuda=False,
    formats="int8 weights",
    num_parameters=1,
    weight_bytes=8 * GIB,
    working_bytes=GIB,
    kv_dtype="float16",
    kv_bytes_per_token=2**20,
    max_model_len=4096,
    num_ranks=1,
)
ON_GPU = dataclasses.replace(NEEDS, on_cuda=True)


@pytest.mark.parametrize(
    ("facts", "needs", "level", "what"),
    [
        (HEALTHY, NEEDS, Level.OK, "room for 21,504 tokens of KV cache, 5.2 requests of full length"),
        (changed(MEMORY, available=12 * GIB), NEEDS, Level.WARNING, "room for 3,072 tokens"),
        (changed(MEMORY, available=9 * GIB), NEEDS, Level.ERROR, "take 9.0 GiB, and 9.0 GiB of this machine's memory"),
        (changed(MEMORY, left_of_limit=4 * GIB, limit=4 * GIB), NEEDS, Level.ERROR, "does not fit"),
        (changed(MEMORY, available=20 * GIB), dataclasses.replace(NEEDS, num_ranks=2), Level.WARNING, "1,024 tokens"),
        (WITH_GPU, ON_GPU, Level.OK, "M fits"),
        (HEALTHY, ON_GPU, Level.ERROR, "torch sees none"),
        (WITH_GPU, dataclasses.replace(ON_GPU, num_ranks=2), Level.ERROR, "there are 1 GPUs"),
        (
            changed(GPU, WITH_GPU, gpus=(dataclasses.replace(H200, free=9 * GIB),)),
            ON_GPU,
            Level.ERROR,
            "9.0 GiB of H200 are free",
        ),
    ],
)
def test_model(facts: Facts, needs: Needs, level: Level, what: str) -> None:
    [finding] = check_model(facts, EngineConfig(), "M", needs)
    assert (finding.level, what in finding.what) == (level, True), finding


def test_report() -> None:
    """What matters most is last, and JSON has all."""
    findings = find(changed(SETTINGS, problem="x", open_files=(1, 1)))
    text = as_text(findings)
    assert text.index("ok ") < text.index("warning") < text.index("error")
    assert text.endswith("1 error, 1 warning, 0 notes.")
    document = json.loads(as_json(HEALTHY, findings))
    assert document["ok"] is False
    assert [Finding(**{**one, "level": Level(one["level"])}) for one in document["findings"]] == findings
    assert document["facts"]["processor"]["flags"] == ["avx2", "avx512_vnni", "avx512bw", "avx512vl"]
