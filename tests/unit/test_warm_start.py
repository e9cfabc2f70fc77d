"""A child that starts warm is as one that starts cold, but for its imports."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm_start

HEADWAY = [sys.executable, "-P", "-m", "headway"]
WARM = subprocess._fork_exec is not warm_start._cold  # type: ignore[attr-defined]
pytestmark = pytest.mark.skipif(not WARM, reason="children start cold here")


@pytest.fixture
def cold_starts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that start cold."""
    commands: list[list[str]] = []

    def fork_exec(*arguments: Any) -> int:
        words = [os.fsdecode(word) for word in arguments[0]]
        if warm_start.__file__ not in words:
            commands.append(words)
        return cold(*arguments)

    cold = warm_start._cold
    monkeypatch.setattr(warm_start, "_cold", fork_exec)
    return commands


@contextmanager
def writing(**options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child that cannot go on, because what it writes finds no room in its pipe."""
    output, end = os.pipe()
    os.write(end, b"." * fcntl.fcntl(end, fcntl.F_GETPIPE_SZ))
    with os.fdopen(output, "rb") as reader:
        child = subprocess.Popen([*HEADWAY, "--help"], stdout=end, **options)
        os.close(end)
        try:
            yield child
        finally:
            reader.read()
            assert child.wait(timeout=30) == 0


def test_its_parent_command_folder_and_session_are_those_that_were_asked_for(
    cold_starts: list[list[str]], tmp_path: Path
) -> None:
    with writing(cwd=tmp_path, start_new_session=True) as child:
        process = Path(f"/proc/{child.pid}")
        _, parent, group, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
        assert (int(parent), int(group), int(session)) == (os.getpid(), child.pid, child.pid)
        shown = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert [os.fsdecode(word) for word in shown] == [*HEADWAY, "--help"]
        assert os.readlink(process / "cwd") == str(tmp_path)
    assert not cold_starts


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["no-such-command"], 2)])
def test_what_it_prints_and_its_exit_status_are_those_of_a_cold_start(
    cold_starts: list[list[str]], monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int
) -> None:
    def run() -> tuple[int, str, str]:
        done = subprocess.run([*HEADWAY, *arguments], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    warm = run()
    assert not cold_starts and warm[0] == status
    monkeypatch.setattr(warm_start, "WARM_MODULES", ())
    assert run() == warm
    assert len(cold_starts) == 1


def test_its_environment_is_its_own(cold_starts: list[list[str]]) -> None:
    def longest_line(columns: str) -> int:
        environment = {**os.environ, "COLUMNS": columns}
        done = subprocess.run([*HEADWAY, "serve", "--help"], capture_output=True, text=True, env=environment)
        return max(len(line) for line in done.stdout.splitlines())

    assert longest_line("60") < longest_line("200")
    assert not cold_starts


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (HEADWAY, {"OMP_NUM_THREADS": "3"}),
        (HEADWAY, {"PYTHONHASHSEED": "1"}),
        (["env", *HEADWAY], {}),
    ],
    ids=["threads", "hashes", "another program"],
)
def test_what_imports_depend_on_starts_cold(
    cold_starts: list[list[str]], command: list[str], variables: dict[str, str]
) -> None:
    command = [*command, "no-such-command"]
    subprocess.run(command, env={**os.environ, **variables}, capture_output=True)
    assert cold_starts == [command]


def test_its_signals_reach_it(cold_starts: list[list[str]]) -> None:
    process = subprocess.Popen([*HEADWAY, "chat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process.kill()
    assert process.wait(timeout=30) == -9
    process.communicate()
    assert not cold_starts
