"""The environment: variables, limits, and the clock."""

from __future__ import annotations

from collections.abc import Iterator

from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, error, note, ok, warning
from headway.doctor.tuning import BOUNDS

_SUBJECT = "settings"
_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_NOT_BINDING = ("", "false", "disabled", "none")
_TRUE = ("1", "true", "yes", "on")


def check_settings(facts: Facts) -> Iterator[Finding]:
    """What the environment says that Headway or its libraries heed."""
    settings = facts.settings
    before = [*_options(facts), *_threads(facts), *_devices(facts), *_limits(facts)]
    yield from before
    if settings.clock_s < settings.built_s - BOUNDS.clock_slack_s:
        yield error(
            "clock",
            "The clock is earlier than the day on which Headway was installed.",
            "Certificates count as not valid yet, so that nothing can be fetched; times in logs are wrong.",
            "Set the clock, and let it be kept by NTP ('timedatectl set-ntp true').",
        )
    elif not before:
        yield ok(_SUBJECT, "No variable, limit or clock that needs attention.")


def _options(facts: Facts) -> Iterator[Finding]:
    settings = facts.settings
    if settings.problem:
        yield error(
            _SUBJECT,
            f"An option in the environment cannot be used: {settings.problem}",
            "Every command that has this option ends with this error.",
            "Correct or unset the variable.",
        )
    for sentence in settings.unknown.values():
        yield warning(_SUBJECT, sentence, "It has no effect.", "Correct its name, or unset it.")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if settings.variables.get(name, "").lower() in _TRUE:
            yield note(_SUBJECT, f"{name} is set.", "Only models that are on this machine are found.")


def _threads(facts: Facts) -> Iterator[Finding]:
    variables, cores = facts.settings.variables, facts.processor.num_usable
    for name in _BINDING:
        if variables.get(name, "").strip().lower() not in _NOT_BINDING:
            yield warning(
                _SUBJECT,
                f"{name} is {variables[name]}.",
                "OpenMP binds the first thread to one core, and Headway's threads inherit that: they share one core.",
                f"Unset {name}. To bind all of Headway to cores, use 'taskset' or 'numactl'.",
            )
    number = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if number.isdigit() and int(number) > cores:
        yield warning(
            _SUBJECT,
            f"OMP_NUM_THREADS is {number}, and there are {cores} cores.",
            "Where torch computes, its threads wait for each other.",
            f"Unset it, or set it to {cores}.",
        )
    elif number.isdigit() and int(number) < cores:
        yield note(
            _SUBJECT,
            f"OMP_NUM_THREADS is {number}.",
            "It does not limit Headway's own kernels, which use all usable cores.",
            "To limit them, use --num-threads.",
        )
    if variables.get("OMP_WAIT_POLICY", "").strip().lower() == "active":
        yield warning(
            _SUBJECT,
            "OMP_WAIT_POLICY is active.",
            "Idle threads of torch keep their cores busy, which Headway's kernels need.",
            "Unset OMP_WAIT_POLICY.",
        )


def _devices(facts: Facts) -> Iterator[Finding]:
    variables = facts.settings.variables
    if variables.get("TRITON_INTERPRET") == "1":
        yield error(
            _SUBJECT,
            "TRITON_INTERPRET is 1.",
            "GPU kernels run in Python, a millisecond for each tile; it is meant for tests.",
            "Unset TRITON_INTERPRET.",
        )
    if facts.cuda.gpus and variables.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield warning(
            _SUBJECT,
            "CUDA_LAUNCH_BLOCKING is 1.",
            "The host waits for every kernel, so that no step is prepared while another runs.",
            "Unset CUDA_LAUNCH_BLOCKING, unless you look for a fault.",
        )


def _limits(facts: Facts) -> Iterator[Finding]:
    limits = facts.settings.open_files
    if limits is not None and 0 <= limits[1] < BOUNDS.few_files:
        yield warning(
            _SUBJECT,
            f"At most {limits[1]:,} files may be open.",
            "Each connection is one; further clients wait until others leave.",
            "Raise the hard limit: 'ulimit -Hn 65536' as root, LimitNOFILE= in a systemd unit, '--ulimit' of Docker.",
        )
