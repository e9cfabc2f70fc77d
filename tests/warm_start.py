"""Child processes of the tests that start warm: forked from a process that has imported torch and the engine already.

An engine, a front end or a rank imports for up to three seconds before it does anything, and the tests start hundreds
of them. `install()` has `subprocess` hand commands of the form `python -m headway…` to a process of ours, the nursery,
which has done these imports once. It makes the child with `clone(CLONE_PARENT)`, so the child is a child of the process
that asked: `wait`, signals, `getppid` and death signals work as after an `exec`. A child that starts processes itself
has a nursery of its own, forked from it before it does anything else.

Only the imports are skipped. What differs from a start with `exec` in anything else (another environment of the
interpreter or its libraries, a shell, `-c`) starts cold, as does everything with HEADWAY_TESTS_COLD=1 or where the
kernel refuses.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import dataclasses
import gc
import os
import pickle
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

COMM = "warm-start"
"""The name of a nursery in /proc/PID/comm."""
STARTS_CHILDREN = ("headway", "headway.engine_process.main")
WARM_MODULES = (*STARTS_CHILDREN, "headway.worker.rank_process")
IMPORTED = (
    "uvloop",
    "headway.cli.serve_parent",
    "headway.server.serving",
    "headway.engine_process.engine_loop",
    "headway.wire.shared_channel",
    "headway.engine.llm_engine",
    "headway.executor.local",
    "headway.executor.ranks",
    "headway.models.assembly",
    "headway.runner.eager_runner",
    "headway.attention.cpu",
    "headway.loader.gguf_checkpoint",
    "headway.loader.model_tokenizer",
    "headway.structured.guides",
)
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH", "TRITON_", "CUDA", "MALLOC_")
"""Variables that the interpreter and libraries read when they are loaded: another value of them needs a cold start."""
_CLONE_CALL = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_NAME = 15
_LONGEST_COMMAND = 4096
_MAX_REQUEST = 2**20

_cold = subprocess._fork_exec  # type: ignore[attr-defined]
_cold_create = asyncio.create_subprocess_exec


@dataclass
class _Child:
    """What a child is made from. The descriptors that it is to have travel beside it, in the order of `targets`, and
    after them the pipe whose end says that the child is ready."""

    arguments: list[str]
    environment: dict[bytes, bytes]
    directory: str
    targets: list[int]
    """The number of each descriptor in the child."""
    new_session: bool
    group: int
    umask: int
    ignored: list[int] = field(default_factory=list)
    """Signals that the process which asks ignores."""
    cores: list[int] = field(default_factory=list)
    open_files: tuple[int, int] = (0, 0)
    niceness: int = 0


class _Nursery:
    """The end of the process that asks. It asks from any thread."""

    def __init__(self, start: Callable[[], socket.socket]) -> None:
        self._start = start
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def fork(self, child: _Child, descriptors: list[int]) -> int:
        """The child's process id, or 0 if it cannot be made."""
        with self._lock:
            if self._channel is None:
                self._channel = self._start()
            message = pickle.dumps(dataclasses.asdict(child))
            try:
                socket.send_fds(self._channel, [len(message).to_bytes(4, "little")], descriptors)
                self._channel.sendall(message)
                return int.from_bytes(_received(self._channel, 4), "little")
            except (OSError, EOFError):
                return 0

    def _forget(self) -> None:
        self._lock = threading.Lock()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def install() -> None:
    """Let children start warm from now on. The nursery itself starts with the first of them."""
    if sys.platform != "linux" or _CLONE_CALL is None or os.environ.get("HEADWAY_TESTS_COLD") == "1":
        return
    _use(_Nursery(_start_nursery))


def _use(nursery: _Nursery) -> None:
    def fork_exec(*arguments: Any) -> int:
        request = _request(arguments)
        return (request and nursery.fork(*request)) or _cold(*arguments)

    async def create(*command: str, **options: Any) -> Any:
        """uvloop starts processes by itself, not with `subprocess`."""
        if _module(command) is None:
            return await _cold_create(*command, **options)
        return _Awaited(subprocess.Popen(command, **options))

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = create  # type: ignore[assignment]


def is_nursery(pid: int) -> bool:
    """Whether a process is none of Headway's but makes its children in tests, or has just ended."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip() == COMM
    except OSError:
        return True


class _Awaited:
    """A process whose end an event loop waits for."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self.kill = process.kill
        self._process = process
        self._ended = asyncio.Event()
        self._file = os.pidfd_open(process.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._end)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        return self._process.returncode

    def _end(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)
        self._process.wait()
        self._ended.set()


def _request(arguments: tuple[Any, ...]) -> tuple[_Child, list[int]] | None:
    """What `subprocess` gives to its C function, as a request; None if that must start cold."""
    try:
        (command, _, _, kept, directory, environment, stdin, _, _, stdout, _, stderr, _, error_pipe) = arguments[:14]
        (_, new_session, group, gid, gids, uid, umask, preexec) = arguments[14:22]
    except ValueError:  # another version of Python
        return None
    words = [os.fsdecode(word) for word in command]
    if _module(words) is None:
        return None
    if preexec is not None or (gid, gids, uid) != (None, None, None) or len(" ".join(words)) > _LONGEST_COMMAND:
        return None
    variables = dict(os.environb if environment is None else (pair.split(b"=", 1) for pair in environment))
    if _read_at_import(variables) != _read_at_import(os.environb):
        return None
    targets = {0: stdin, 1: stdout, 2: stderr, **{number: number for number in kept if number != error_pipe}}
    child = _Child(
        words,
        variables,
        os.fspath(directory) if directory is not None else os.getcwd(),
        list(targets),
        bool(new_session),
        group,
        umask,
        [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        sorted(os.sched_getaffinity(0)),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        os.nice(0),
    )
    # `Popen` returns when the last copy of the error pipe is closed: at an `exec`, or at the end of `_become`.
    return child, [target if source == -1 else source for target, source in targets.items()] + [error_pipe]


def _module(command: Sequence[str]) -> str | None:
    """The module that a command runs, if it can start warm."""
    start = [word for word in command[:4] if word != "-P"]
    return start[2] if start[:2] == [sys.executable, "-m"] and start[2] in WARM_MODULES else None


def _read_at_import(variables: Any) -> dict[bytes, bytes]:
    starts = tuple(start.encode() for start in READ_AT_IMPORT)
    return {name: value for name, value in variables.items() if name.startswith(starts)}


def _start_nursery() -> socket.socket:
    """A process of the nursery's own. A death signal comes at the end of the thread that started a process and, after
    `CLONE_PARENT`, its siblings: so that thread never ends."""
    ours, theirs = socket.socketpair()
    started = threading.Event()

    def live() -> None:
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), "." * _LONGEST_COMMAND]
        with theirs:
            subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it starts its threads when it is loaded
            )
        started.set()
        threading.Event().wait()

    threading.Thread(target=live, name=COMM, daemon=True).start()
    started.wait()
    return ours


# ---- in the nursery -------------------------------------------------------------------------------------------------


class _Memory:
    """What `clone` must know of this process's memory: where glibc keeps the id of the thread, and where the command
    line is that /proc shows."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None)  # it keeps the interpreter's lock, as a fork must
        self.syscall = libc.syscall
        self.syscall.restype = ctypes.c_long
        self.prctl = libc.prctl
        libc.pthread_self.restype = ctypes.c_void_p
        thread, words = libc.pthread_self(), 512
        numbers = (ctypes.c_int * words).from_address(thread)
        self.thread_id = thread + 4 * next(place for place in range(words) if numbers[place] == os.getpid())
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        self.command, self.command_end = int(fields[45]), int(fields[46])

    def clone(self) -> int:
        """As `os.fork`, but the child's parent is the parent of this process."""
        flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
        last = (self.thread_id, 0) if platform.machine() == "x86_64" else (0, self.thread_id)
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = self.syscall(*(ctypes.c_long(value) for value in (_CLONE_CALL, flags, 0, 0, *last)))
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        else:
            ctypes.pythonapi.PyOS_AfterFork_Parent()
        return pid

    def show(self, command: list[str]) -> None:
        shown = b"\0".join(os.fsencode(word) for word in command) + b"\0"
        length = self.command_end - self.command
        ctypes.memmove(self.command, shown[:length].ljust(length, b"\0"), length)

    def name(self, name: str) -> None:
        self.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _received(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := channel.recv(count - len(data))):
            raise EOFError
        data += part
    return data


def _attend(channel: socket.socket, memory: _Memory) -> tuple[_Child, socket.socket | None]:
    """Make children until the process that asks for them has ended; returns only in a child, or in its nursery's."""
    while True:
        header, descriptors, _, _ = socket.recv_fds(channel, 4, 200)
        if not header:
            os._exit(0)
        child = _Child(**pickle.loads(_received(channel, int.from_bytes(header, "little"))))
        pid = memory.clone() if len(os.listdir("/proc/self/task")) == 1 else -1
        if pid != 0:
            for descriptor in descriptors:
                os.close(descriptor)
            channel.sendall(max(pid, 0).to_bytes(4, "little"))
            continue
        channel.close()
        ours = None
        if _module(child.arguments) in STARTS_CHILDREN:
            ours, channel = socket.socketpair()
            if os.fork() == 0:
                ours.close()
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            channel.close()
        _become(child, descriptors, ours, memory)
        return child, ours


def _become(child: _Child, descriptors: list[int], nursery: socket.socket | None, memory: _Memory) -> None:
    """Give this process all that an `exec` would have given it."""
    memory.name("python")
    memory.show(child.arguments)
    if child.new_session:
        os.setsid()
    if child.group >= 0:
        os.setpgid(0, child.group)
    if child.umask >= 0:
        os.umask(child.umask)
    os.sched_setaffinity(0, child.cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, child.open_files)
    os.nice(child.niceness - os.nice(0))
    os.chdir(child.directory)
    os.environ.clear()
    for name, value in child.environment.items():
        os.environb[name] = value
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in child.ignored:
        signal.signal(number, signal.SIG_IGN)
    above = max(child.targets) + 1
    if nursery is not None and nursery.fileno() < above:
        moved = socket.socket(fileno=_moved(nursery.fileno(), above))
        nursery.close()
        nursery.__init__(fileno=moved.detach())  # type: ignore[misc]
    *moved_descriptors, error_pipe = [_moved(descriptor, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, target in zip(moved_descriptors, child.targets):
        os.dup2(descriptor, target, inheritable=True)
        os.close(descriptor)
    os.close(error_pipe)


def _moved(descriptor: int, above: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)


def main() -> None:
    """The nursery: import, attend, and in a child run its module as `python -m` would."""
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = _Memory()
    memory.name(COMM)
    for module in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    child, nursery = _attend(socket.socket(fileno=int(sys.argv[1])), memory)
    if nursery is not None:
        _use(_Nursery(lambda: nursery))
    module = _module(child.arguments)
    assert module is not None
    sys.argv[:] = child.arguments[child.arguments.index("-m") + 1 :]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # as if it had never been imported
    os._exit(_run(module))
    return None


def _run(module: str) -> int:
    """As `python -m` runs it, to the exit status. What the nursery imported need not be torn down afterwards."""
    status: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return status if isinstance(status, int) else int(status is not None)


if __name__ == "__main__":
    main()
