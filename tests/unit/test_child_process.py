"""Processes of Python's: none imports a module that lies in the working directory, and one ends with its parent."""

from __future__ import annotations

import ast
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.child_process import python_command
from headway.wire.frames import FrameReader, pack
from headway.wire.messages import Start, StartUpFailed, decode_from_engine

PACKAGE = Path(__file__).parents[2] / "src" / "headway"
PLANTED = "open('imported', 'w').close()\n"


def interpreters(source: str) -> Iterator[int]:
    """Lines that name the interpreter, but for texts that are shown; and those that let a library start it."""
    if not re.search("sys.executable|spawn|forkserver|ProcessPoolExecutor", source):
        return
    tree = ast.parse(source)
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    shown = {id(node) for text in texts for node in ast.walk(text)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_one = ast.unparse(node) == "sys.executable" and id(node) not in shown
        elif isinstance(node, ast.Constant):
            is_one = node.value in ("spawn", "forkserver")
        else:
            is_one = isinstance(node, ast.Name | ast.alias) and "ProcessPoolExecutor" in ast.unparse(node)
        if is_one:
            yield node.lineno


def test_one_function_writes_every_command_of_the_interpreter() -> None:
    found = {file.relative_to(PACKAGE).as_posix(): [*interpreters(file.read_text())] for file in PACKAGE.rglob("*.py")}
    assert {file for file, lines in found.items() if lines} == {"child_process.py"}


def test_a_planted_module_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text(f"import os\n{PLANTED}")
    for command, is_imported in (
        (python_command("json.tool", "--help"), False),
        ([sys.executable, "-m", "json.tool", "--help"], True),  # as it would be
    ):
        subprocess.run(command, cwd=tmp_path, capture_output=True)
        assert (tmp_path / "imported").exists() == is_imported


def test_a_factory_in_the_working_directory_is_found_behind_all_other_modules(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text(PLANTED)
    (tmp_path / "own_factory.py").write_text("def make(options): raise ValueError(options['model'])\n")
    ours, theirs = socket.socketpair()
    command = python_command("headway.engine_process.main", "--fd", str(theirs.fileno()))
    process = subprocess.Popen(
        [*command, "--factory", "own_factory:make"],
        cwd=tmp_path,
        pass_fds=(theirs.fileno(),),
        stderr=subprocess.DEVNULL,
    )
    with ours, theirs, process:
        theirs.close()
        ours.settimeout(60)
        ours.sendall(pack(Start({"model": "a name"})))
        frames, messages = FrameReader(), []
        while data := ours.recv(65536):
            messages += [decode_from_engine(payload) for payload in frames.feed(data)]
        assert [one.message for one in messages if isinstance(one, StartUpFailed)] == ["ValueError: a name"]
    assert not (tmp_path / "imported").exists()


CHILD = """
import os, sys, time
from headway.child_process import end_with_parent
end_with_parent(int(sys.argv[1]))
os.write(1, b"%d " % os.getpid())
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
parent_pid = os.getpid() + int(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(parent_pid)])
if sys.argv[2] == "0":
    time.sleep(60)
sys.exit(child.wait())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_stopped_process_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, "0"], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        child = int(os.read(parent.stdout.fileno(), 20))
        os.kill(child, signal.SIGSTOP)
        parent.kill()
        assert parent.stdout.read() == b""  # comes to its end when the child has ended, too


def test_a_process_whose_parent_has_ended_before_ends_at_once() -> None:
    assert subprocess.run([sys.executable, "-c", PARENT, CHILD, "1"], timeout=60).returncode == 1


def test_a_process_shows_where_it_stands_and_goes_on() -> None:
    code = (
        "import os\n"
        "from headway.child_process import DUMP_SIGNAL, show_stacks_on_signal\n"
        "show_stacks_on_signal()\n"
        "def waits_here(): os.kill(os.getpid(), DUMP_SIGNAL)\n"
        "waits_here()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "in waits_here" in done.stderr


LOGS = """
import logging, sys
from headway.child_process import show_logs
show_logs(eval(sys.argv[1]), "%(message)s %(levelname)s")
logging.getLogger("theirs").setLevel(logging.INFO)
for number in (logging.DEBUG, logging.INFO, logging.ERROR):
    logging.getLogger("headway.core").log(number, "ours")
    logging.getLogger("theirs").log(number, "theirs")
"""


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["ours DEBUG", "ours INFO", "theirs INFO", "ours ERROR", "theirs ERROR"]),
        ("INFO", ["ours INFO", "theirs INFO", "ours ERROR", "theirs ERROR"]),
        (logging.ERROR, ["ours ERROR", "theirs ERROR"]),
        ("critical", []),
    ],
)
def test_logs_are_shown_from_a_level_on(level: str | int, shown: list[str]) -> None:
    """Also those of packages with a level of their own, which is lower."""
    done = subprocess.run([sys.executable, "-P", "-c", LOGS, repr(level)], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == shown
