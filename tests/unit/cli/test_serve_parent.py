"""The parent with front ends that are a few lines each: processes, signals, and the socket that outlives them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

PARENT = """
import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if what runs the tests ignores it
import sys
from headway.cli.serve_parent import Parent

sys.exit(Parent([sys.executable, "-c", sys.argv[1]]).run())
"""
FRONT_END = """
import os, signal, socket, subprocess, sys, time
from headway.server.parent_link import ParentLink

link = ParentLink.from_environment()
listener = link.listener or socket.create_server(("127.0.0.1", 0))
link.bound(listener, hang_timeout_s={hang_s}, stop_s={stop_s})
if {ready}:
    link.ready()
print(os.getpid(), link.num_restarts, listener.getsockname()[1], flush=True)
if link.num_restarts == {num_lives} - 1:
    sys.exit(0)
"""
LIGHT = """
import sys
import headway.cli.main, headway.cli.serve_parent

print(len(sys.modules), *sorted({"asyncio", "msgspec", "numpy", "headway.config", "uvicorn"} & set(sys.modules)))
"""


@contextlib.contextmanager
def parent_of(
    program: str, *, ready: bool = True, num_lives: int = 99, hang_s: float = 0.0, stop_s: float = 30.0
) -> Iterator[subprocess.Popen[str]]:
    """A parent of front ends that run this program, and of one that ends well after `num_lives` - 1 of them."""
    code = FRONT_END.format(ready=ready, num_lives=num_lives, hang_s=hang_s, stop_s=stop_s) + program
    command = [sys.executable, "-c", PARENT, code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def errors(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


def state(pid: int) -> str:
    """As Linux has it: R runs, S sleeps, T is stopped, Z has ended; nothing for one that is not there."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(pid: int) -> bool:
    return state(pid) in ("", "Z")


def test_the_parent_imports_next_to_nothing() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", LIGHT], capture_output=True, text=True, check=True)
    number, *heavy = done.stdout.split()
    assert not heavy and int(number) < 150


@pytest.mark.parametrize(("program", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)])
def test_a_start_that_fails_ends_the_parent_with_its_code(program: str, code: int) -> None:
    with parent_of(program, ready=False) as process:
        assert process.wait(timeout=20) == code
        assert errors(process) == ""


def test_one_that_dies_is_followed_by_another_which_takes_what_has_waited() -> None:
    program = """
if link.num_restarts == 0:
    signal.pause()
accepted, _ = listener.accept()
accepted.sendall(b"served")
"""
    with parent_of(program) as process:
        first = line(process)
        os.kill(first[0], signal.SIGKILL)
        with socket.create_connection(("127.0.0.1", first[2]), timeout=20) as client:
            assert client.recv(10) == b"served"
        second = line(process)
        assert second[1:] == [1, first[2]] and second[0] != first[0]
        assert process.wait(timeout=20) == 0
        assert "ended with status -9; it is started again in 0.5 s" in errors(process)


def test_one_that_stands_still_leaves_its_stacks() -> None:
    """Its interpreter lock is held all the time: the pattern goes on for ages."""
    program = "import re\ndef busy(): re.match('(a+)+$', 'a' * 50 + 'b')\nbusy()"
    with parent_of(program, hang_s=1.0, num_lives=2) as process:
        assert process.wait(timeout=30) == 0
        said = errors(process)
        assert re.search(r"stood still for 1 s; its stacks:.*in busy\n.*is killed\n.*started again", said, re.DOTALL), (
            said
        )


def test_stops_are_counted_and_nothing_is_started_again() -> None:
    program = """
for number in range(2):
    link._connection.setblocking(True)
    print(len(link._connection.recv(1)), flush=True)
sys.exit(5)
"""
    with parent_of(program) as process:
        port = line(process)[2]
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            assert line(process) == [1], "the signal itself would have ended it"
        assert process.wait(timeout=20) == 5
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("ready", "number", "code"), [(False, signal.SIGTERM, 143), (False, signal.SIGINT, 130), (True, signal.SIGHUP, 129)]
)
def test_a_signal_that_it_does_not_count_reaches_it(ready: bool, number: int, code: int) -> None:
    program = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nprint(1, flush=True)\nsignal.pause()"
    with parent_of(program, ready=ready) as process:
        line(process)
        line(process)
        process.send_signal(number)
        assert process.wait(timeout=20) == code
        assert errors(process) == ""


def test_one_that_does_not_end_is_killed() -> None:
    with parent_of("while True: time.sleep(0.1); link._send(b'T')", stop_s=1.0) as process:
        line(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 137
        assert "has not ended within" in errors(process)


def test_what_it_has_started_ends_with_it() -> None:
    program = """
child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000"])
print(child.pid, flush=True)
sys.exit(1)
"""
    with parent_of(program, ready=False) as process:
        line(process)
        orphan = line(process)[0]
        assert process.wait(timeout=20) == 1
        assert is_gone(orphan)


def test_it_does_not_outlive_its_parent() -> None:
    with parent_of("while True: pass") as process:
        front_end = line(process)[0]
        process.kill()
        process.wait()
        until_s = time.monotonic() + 20
        while not is_gone(front_end):
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_stopped_terminal_job_stops_as_a_whole() -> None:
    with parent_of("while True: print(0, flush=True); time.sleep(0.02)") as process:
        front_end = line(process)[0]
        process.send_signal(signal.SIGTSTP)
        until_s = time.monotonic() + 20
        while (state(process.pid), state(front_end)) != ("T", "T"):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        while "T" in (state(process.pid), state(front_end)):
            assert time.monotonic() < until_s
            time.sleep(0.01)
