"""`make` from a bare checkout, with a Python that only pretends."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """\
#!/bin/sh
[ "$1" = -c ] && exit 0
[ "$1" = --version ] && echo "Python 3.99" && exit 0
case "$*" in
  "-m venv "*)
    mkdir -p "$3/bin"
    for name in python headway pytest ruff mypy lint-imports; do ln -s "$0" "$3/bin/$name"; done ;;
  *FAILING*) echo "there is no network" >&2; exit 1 ;;
esac
[ "$1" = serve ] && echo "serving $2"
name=${0##*/}
[ "$name" = python ] || [ "$name" = headway ] || echo "$name $*"
exit 0
"""


def make(
    folder: Path, target: str, *, failing: str = "no such part", arguments: str = "--now"
) -> subprocess.CompletedProcess[str]:
    """All parts succeed at once, but for those whose command has `failing` in it."""
    python = folder / "python"
    python.write_text(PYTHON.replace("FAILING", f'"{failing}"'))
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), target, f"VENV={folder / 'venv'}", f"PYTHON={python}", f"ARGS={arguments}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(autouse=True)
def _needs_make() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")


def test_the_first_start_says_how_long_each_part_takes_and_the_second_has_none(tmp_path: Path) -> None:
    first = make(tmp_path, "serve")
    assert first.returncode == 0, first.stderr
    lines = [line for line in first.stdout.splitlines() if not line.startswith("make")]
    expected = [
        "Making .*venv with Python 3.99",
        "Installing Headway .*",
        "Bringing the embedded model .*",
        "Compiling.*",
    ]
    assert len(lines) == len(expected) + 1 and lines[-1] == "serving --now"
    for line, text in zip(lines, expected):
        assert re.fullmatch(rf"{text} … \d+ s", line), line
    second = make(tmp_path, "serve")
    assert [line for line in second.stdout.splitlines() if not line.startswith("make")] == ["serving --now"]


def test_a_part_that_fails_says_so_and_ends_the_start(tmp_path: Path) -> None:
    done = make(tmp_path, "serve", failing="pip install -qq -e .")
    assert done.returncode != 0 and "there is no network" in done.stderr
    assert re.search(r"Installing Headway .* … failed after \d+ s", done.stdout)
    assert "serving" not in done.stdout
    assert make(tmp_path, "serve").returncode == 0, "the next try starts with what failed"


def test_without_a_compiler_one_is_installed_and_without_any_the_start_goes_on(tmp_path: Path) -> None:
    done = make(tmp_path, "serve", failing="headway.native")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Compiling the CPU kernels … failed after \d+ s", done.stdout)
    assert re.search(r"No working C compiler found; installing one into .* … \d+ s", done.stdout)
    assert "going on with the slower torch kernels" in done.stderr and "serving --now" in done.stdout


def test_the_doors_run_all_checks_the_quick_ones_or_what_is_named(tmp_path: Path) -> None:
    def ran(target: str, arguments: str) -> list[str]:
        done = make(tmp_path, target, arguments=arguments)
        assert done.returncode == 0, done.stderr
        tools = ("pytest", "ruff", "mypy", "lint-imports")
        return sorted(line.strip() for line in done.stdout.splitlines() if line.startswith(tools))

    shared = "pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder"
    checks = ["lint-imports --no-cache", "mypy", "ruff check .", "ruff format --check ."]
    assert ran("test", "") == sorted([*checks, shared])
    assert ran("check", "") == sorted([*checks, f"{shared} --quick"])
    assert ran("test", "'tests/x.py::y[a b]' -x") == ["pytest tests/x.py::y[a b] -x"]


@pytest.mark.parametrize("failing", ["ruff", "mypy", "lint-imports", "pytest"])
def test_whatever_fails_fails_the_whole(tmp_path: Path, failing: str) -> None:
    make(tmp_path, "setup")
    tool = tmp_path / "venv" / "bin" / failing
    tool.unlink()
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    assert make(tmp_path, "test", arguments="").returncode != 0
