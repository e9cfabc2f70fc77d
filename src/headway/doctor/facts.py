"""What is known of a machine. A fact that the system does not tell is `None`, or empty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The CPU, and what of it this process may use."""

    name: str = ""
    system: str = "Linux"
    machine: str = "x86_64"
    flags: frozenset[str] = frozenset()
    """Instruction sets, as Linux names them. Empty on other systems."""
    num_cores: int = 1
    """Those of the machine."""
    num_usable: int = 1
    """Those that this process may run on."""
    quota: float | None = None
    """Cores' worth of time that a cgroup allows."""
    num_numa_nodes: int = 1
    """Memory nodes that the usable cores belong to."""
    governor: str = ""
    """How the first core's frequency is chosen."""
    load: float = 0.0
    """How many programs have run at once, on average over the last minute."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the host, in bytes."""

    total: int = 0
    available: int | None = None
    limit: int | None = None
    """The tightest limit of a cgroup."""
    left_of_limit: int | None = None
    huge_pages: str = ""
    """The setting of transparent huge pages: always, madvise or never."""
    refuses_overcommit: bool = False
    """Whether the kernel refuses memory that it may not be able to give."""
    shared_total: int | None = None
    """The size of /dev/shm."""
    shared_free: int | None = None

    @property
    def usable(self) -> int:
        """What a new process can get."""
        known = [size for size in (self.available, self.left_of_limit) if size is not None]
        return min(known) if known else self.total


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    total: int
    """Its memory in bytes."""
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """NVIDIA's driver, and what torch makes of it."""

    driver: str = ""
    """The version of the kernel's module; empty: there is none."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver's library supports; `None`: there is no such library."""
    has_devices: bool = False
    """Whether there are device files."""
    torch_cuda: str | None = None
    """The CUDA that torch was built for; `None`: for CPUs alone."""
    problem: str = ""
    """Why torch sees no GPU, in its words."""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What the kernels need, and those that are compiled already."""

    library: str = ""
    """Where the CPU kernels come from: shipped, or compiled; empty: they have yet to be compiled."""
    isa: str = ""
    """The instruction set of that library."""
    problem: str = ""
    """Why the library cannot be used."""
    wanted_isa: str = ""
    """What HEADWAY_NATIVE_ISA asks for."""
    compilers: tuple[str, ...] = ()
    has_python_headers: bool = False
    has_triton_compiler: bool = False
    """Whether there is a C compiler that Triton finds."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """Versions of packages."""

    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """By name; `None`: not installed."""
    unmet: tuple[str, ...] = ()
    """Requirements of Headway that are not met, each with what is there instead."""
    mend_unmet: str = ""
    """The command that installs them."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder in which files are kept."""

    purpose: str
    path: str
    variable: str
    """The environment variable that chooses another one."""
    problem: str = ""
    """Why it cannot be written to."""
    free: int | None = None
    """Free bytes of its file system."""
    is_noexec: bool = False
    """Whether programs and libraries in it cannot be run."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Where the server would listen, and how requests go out."""

    host: str = "127.0.0.1"
    port: int = 8000
    port_problem: str = ""
    """Why the port cannot be listened on."""
    proxies: Mapping[str, str] = field(default_factory=dict)
    """By variable, without passwords."""
    no_proxy: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The environment of the process."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Those that other libraries read, and that change how Headway runs."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Variables that begin with HEADWAY_ and have no meaning, each with a sentence about it."""
    problem: str = ""
    """Why the options that are set by variables cannot be used."""
    open_files: tuple[int, int] | None = None
    """The soft and the hard limit of open files; -1: none."""
    clock_s: float = 0.0
    """The time of day, in seconds since 1970."""
    built_s: float = 0.0
    """When Headway's newest file was written."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of the machine."""

    headway: str = ""
    """Headway's version."""
    processor: Processor = Processor()
    memory: Memory = Memory()
    cuda: Cuda = Cuda()
    kernels: Kernels = Kernels()
    software: Software = Software()
    folders: tuple[Folder, ...] = ()
    network: Network = Network()
    settings: Settings = Settings()
