"""Helper processes for work on clients' schemas, regexes, grammars and tools. Each does one job and can be killed.

With some short texts such work never ends, takes gigabytes, or overflows the stack and ends the process; and a thread
that does it cannot be stopped.

    caller ──a socket for each job──▶ nursery ──fork──▶ helper: does one job, answers, and exits

The nursery has imported what the work needs, holds the tokenizer's trie and has one thread, so that forking it is quick
and safe. A helper has limits of processor time, of time and of memory. When its caller closes the socket, because the
client has left or for any other reason, the nursery kills the helper. When the caller's process ends, so do they all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from headway.child_process import python_command
from headway.errors import HeadwayError
from headway.structured.helper_jobs import do_job, make_trie

STACK_BYTES = 512 * 1024 * 1024
"""llguidance follows rules and references by recursion, and a process whose stack ends is gone. The largest grammar
that it takes (65,000 symbols) needs about 160 MiB; memory that is not used costs nothing."""
MEMORY_BYTES = 256 * 1024 * 1024
"""The memory that one job may take besides the stack."""
START_S = 60.0
"""A job may have to wait until the nursery has built the trie, on a busy machine."""
_HEADER = struct.Struct("<Iddi")
_LENGTH = struct.Struct("<I")


class Limits(NamedTuple):
    """The limits of a job."""

    cpu_s: float
    """Processor time, so that a busy machine refuses no more than an idle one."""
    wall_s: float
    niceness: int = 10
    """The niceness of helpers, which have lower priority than the requests being served."""


class HelpersLostError(HeadwayError):
    """The nursery has died. The next job starts another one."""


class HelperProcesses:
    """The caller's side. It starts the nursery when it is first needed, and again should it have died."""

    def __init__(self, trie_parts: dict[str, Any] | None) -> None:
        """`trie_parts` describe the tokenizer to llguidance (see `make_trie`); None if the model has none."""
        self._trie_parts = trie_parts
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.nursery: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the nursery, so that the first job need not wait for it."""
        with self._lock:
            if self._control is None:
                self._start()

    def run(self, job: bytes, limits: Limits) -> bytes | None:
        """Run a job and wait for its result. None if it exceeded its limits or crashed its process."""
        with self._begin() as channel:
            channel.settimeout(START_S + limits.wall_s)
            try:
                channel.sendall(_framed(job, limits))
                (length,) = _LENGTH.unpack(_received(channel, _LENGTH.size))
                return _received(channel, length)
            except OSError:
                self._check_nursery()
                return None

    async def run_async(self, job: bytes, limits: Limits) -> bytes | None:
        """As `run`, for an event loop. If the call is cancelled, the helper is killed."""
        loop = asyncio.get_running_loop()
        with self._begin() as channel:
            channel.setblocking(False)
            try:
                async with asyncio.timeout(START_S + limits.wall_s):
                    await loop.sock_sendall(channel, _framed(job, limits))
                    (length,) = _LENGTH.unpack(await _received_async(loop, channel, _LENGTH.size))
                    return await _received_async(loop, channel, length)
            except OSError:  # TimeoutError is one
                self._check_nursery()
                return None

    def close(self) -> None:
        """End the nursery and all helpers."""
        with self._lock:
            self._end()

    def _check_nursery(self) -> None:
        nursery = self.nursery
        if nursery is None or nursery.poll() is not None:
            raise HelpersLostError("the process that works on schemas and grammars has died; please try again")

    def _begin(self) -> socket.socket:
        """Our end of a new helper's socket."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):
                if self._control is None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"j"], [theirs.fileno()])
                except OSError:
                    self._end()
                else:
                    return ours
        ours.close()
        raise HelpersLostError("the process that works on schemas and grammars cannot be started")

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self.nursery = subprocess.Popen(
                python_command("headway.structured.helper_processes", str(theirs.fileno())),
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the caller; the nursery ends when the caller's socket does
            )
        threading.Thread(target=_feed, args=(self.nursery, self._trie_parts), name="nursery", daemon=True).start()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.nursery is not None:
            self.nursery.kill()
            self.nursery.wait()
            self.nursery = None


def _feed(nursery: subprocess.Popen[bytes], trie_parts: dict[str, Any] | None) -> None:
    assert nursery.stdin is not None
    with contextlib.suppress(OSError), nursery.stdin:
        nursery.stdin.write(msgspec.json.encode(trie_parts))


def _framed(job: bytes, limits: Limits) -> bytes:
    return _HEADER.pack(len(job), *limits) + job


def _received(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(min(count - len(data), 2**20))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


async def _received_async(loop: asyncio.AbstractEventLoop, channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = await loop.sock_recv(channel, min(count - len(data), 2**20))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


# ---- the nursery and its helpers -----------------------------------------------------------------------------------


class _Helper(NamedTuple):
    """A helper as the nursery sees it."""

    pid: int
    channel: int
    """The nursery's copy of the helper's socket: it shows when the caller has closed its end."""
    life: int
    """The end of a pipe that shows when the helper is gone."""


def run_nursery(control: socket.socket) -> None:
    """Fork a helper for each socket that comes, until the caller has closed its end."""
    parts = msgspec.json.decode(sys.stdin.buffer.read())
    trie = None if parts is None else make_trie(**parts)
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    helpers: dict[int, _Helper] = {}
    """By both of a helper's descriptors."""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != control.fileno():
                if descriptor in helpers:
                    _bury(helpers[descriptor], helpers, poll)
                continue
            message, channels, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                for helper in set(helpers.values()):
                    os.kill(helper.pid, signal.SIGKILL)
                return
            for channel in channels:
                helper = _fork(trie, control, channel)
                for own in (helper.channel, helper.life):
                    helpers[own] = helper
                    poll.register(own, 0)  # a hang-up is always reported


def _bury(helper: _Helper, helpers: dict[int, _Helper], poll: select.poll) -> None:
    """Clean up a helper that has ended or whose caller has left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(helper.pid, signal.SIGKILL)
    os.waitpid(helper.pid, 0)
    for descriptor in (helper.channel, helper.life):
        poll.unregister(descriptor)
        os.close(descriptor)
        del helpers[descriptor]


def _fork(trie: Any, control: socket.socket, channel: int) -> _Helper:
    life, held_by_helper = os.pipe()
    pid = os.fork()
    if pid == 0:
        control.close()
        os.close(life)
        _help(trie, socket.socket(fileno=channel))
    os.close(held_by_helper)
    return _Helper(pid, channel, life)


def _help(trie: Any, channel: socket.socket) -> NoReturn:
    """Do one job in a process of its own, which this ends."""
    try:
        length, cpu_s, wall_s, niceness = _HEADER.unpack(_received(channel, _HEADER.size))
        os.nice(niceness)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # without handlers these signals end the process
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a dying compiler says
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory(STACK_BYTES + MEMORY_BYTES)
        answer = _on_large_stack(trie, _received(channel, length))
        channel.sendall(_LENGTH.pack(len(answer)) + answer)
    finally:
        os._exit(0)


def _on_large_stack(trie: Any, job: bytes) -> bytes:
    answers: list[bytes] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: answers.append(do_job(trie, job)), name="job")
    thread.start()
    thread.join()
    return answers[0]


def limit_memory(more: int) -> None:
    """Let this process take `more` bytes at most. Where a system does not say what it has, time is the only limit."""
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))


if __name__ == "__main__":
    run_nursery(socket.socket(fileno=int(sys.argv[1])))
