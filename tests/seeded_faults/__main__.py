"""Seeds faults into copies of the repository, and says for each which case catches it.

    python -m tests.seeded_faults --quick          only cases of `make check`
    python -m tests.seeded_faults --only awq-order salt-ignored

The files that a fault names are run first, then all that import its module, the shortest first; if none of them fails,
all tests. A case counts only if it passes without the fault.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.recorded_durations import RecordedDurations
from tests.seeded_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".git", ".venv*", ".*_cache", ".carry*", ".hypothesis", "build", "dist", "test_seeded_faults.py")
"""The last one fails with every fault: it says whether they can still be seeded."""
MOST_S = 1800.0
"""For one run of pytest; a case has a limit of its own."""
CASE_S = 120
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)


class Catch(NamedTuple):
    """What became of a fault."""

    case: str | None
    """None: it has survived."""
    is_quick: bool
    seconds: float


class Copy:
    """A copy of the repository, whose own package its tests and their processes import."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        self._environment = os.environ | {"PYTHONPATH": str(folder / "src")}
        found = self._run("-c", "import headway; print(headway.__file__)").stdout.strip()
        if not found.startswith(str(folder)):
            raise RuntimeError(f"the tests of {folder} would import {found}")

    def write(self, file: str, text: str) -> None:
        """Change a module. What was compiled of it may look as new as the change."""
        path = self.root / "src" / "headway" / file
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def first_failure(self, arguments: Sequence[str]) -> str | None:
        """The first case that fails, or what has gone wrong besides."""
        try:
            done = self._run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={CASE_S}", *arguments)
        except subprocess.TimeoutExpired:
            return f"{arguments[-1]}: no end after {MOST_S:.0f} s"
        if done.returncode in (0, 5):  # 5: there is no such case
            return None
        failed = _FAILED.search(done.stdout)
        return failed[1] if failed else f"{arguments[-1]}: {(done.stdout + done.stderr)[-200:]!r}"

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.root, env=self._environment, capture_output=True, text=True, timeout=MOST_S
        )


@functools.cache
def _imports(file: Path) -> frozenset[str]:
    """Everything that a file imports by name: modules, and names in them, which may be modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(name for name in names if name.startswith(("tests", "headway")))


def _passed_on(name: str) -> Path | None:
    """What a test gets by an import beside the module itself: helpers of tests, and what a package takes in."""
    if name.startswith("tests."):
        file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    else:
        file = ROOT.joinpath("src", *name.split("."), "__init__.py")
    return file if file.exists() else None


def _reached(file: Path) -> frozenset[str]:
    found: set[str] = set()
    left = [file]
    while left:
        new = _imports(left.pop()) - found
        found |= new
        left += filter(None, map(_passed_on, new))
    return frozenset(found)


def importing(fault: Fault, durations: RecordedDurations) -> list[str]:
    """The test files that import a fault's module, the shortest first."""
    module = "headway." + fault.file.removesuffix(".py").replace("/", ".")
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if module in _reached(file)]
    return sorted((file.relative_to(ROOT).as_posix() for file in files), key=durations.file_s)


def _stages(fault: Fault, durations: RecordedDurations, *, quick: bool) -> Iterator[list[str]]:
    """Which tests are run, with which options, until one fails."""
    named = [f"tests/{name}" for name in fault.tests.split()]
    others = [name for name in importing(fault, durations) if name not in named]
    everything = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "tests"]
    for option in (["--quick"],) if quick else (["--quick"], []):
        yield from ([*option, *tests] for tests in (named, others) if tests)
    yield [*(["--quick"] if quick else []), *everything]


def catch(fault: Fault, copy: Copy, durations: RecordedDurations, *, quick: bool) -> Catch:
    """Seed a fault, and run tests until one fails that does not without it."""
    begun_s = time.monotonic()
    source = (ROOT / "src" / "headway" / fault.file).read_text(encoding="utf-8")
    for arguments in _stages(fault, durations, quick=quick):
        copy.write(fault.file, source.replace(fault.old, fault.new))
        case = copy.first_failure(arguments)
        copy.write(fault.file, source)
        if case is not None and ("::" not in case or copy.first_failure([case]) is None):
            return Catch(case, durations.is_quick(case), time.monotonic() - begun_s)
    return Catch(None, False, time.monotonic() - begun_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="say which faults there are, and seed none")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[fault.name for fault in FAULTS], help="only these"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies that are tested at a time")
    parser.add_argument("--quick", action="store_true", help="only cases of `pytest --quick`, which `make check` runs")
    arguments = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if arguments.only is None or fault.name in arguments.only]
    width = max(len(fault.name) for fault in faults)
    if arguments.list:
        for fault in faults:
            print(f"{fault.name:{width}}  {fault.file:34}  {fault.seen}")
        return 0
    durations = RecordedDurations.load()
    with tempfile.TemporaryDirectory(prefix="seeded-") as folder, ThreadPoolExecutor(arguments.jobs) as threads:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(min(arguments.jobs, len(faults))):
            copies.put(Copy(Path(folder).resolve() / str(number)))

        def work(fault: Fault) -> Catch:
            copy = copies.get()
            try:
                return catch(fault, copy, durations, quick=arguments.quick)
            finally:
                copies.put(copy)

        results = []
        for fault, result in zip(faults, threads.map(work, faults)):
            results.append(result)
            is_quick = "" if result.case is None else "quick" if result.is_quick else "slow"
            print(
                f"{fault.name:{width}}  {result.seconds:6.1f} s  {is_quick:5}  {result.case or 'SURVIVES'}", flush=True
            )
    caught = [result for result in results if result.case is not None]
    num_quick = sum(result.is_quick for result in caught)
    print(f"{len(caught)} of {len(faults)} caught, {num_quick} by quick cases")
    return 0 if len(caught) == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
