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
  "-m venv "*) mkdir -p "$3/bin" && ln -s "$0" "$3/bin/python" && ln -s "$0" "$3/bin/headway" ;;
  *FAILING*) echo "there is no network" >&2; exit 1 ;;
esac
[ "$1" = serve ] && echo "serving $2"
exit 0
"""


def make(folder: Path, target: str, *, failing: str = "no such part") -> subprocess.CompletedProcess[str]:
    """All parts succeed at once, but for those whose command has `failing` in it."""
    python = folder / "python"
    python.write_text(PYTHON.replace("FAILING", f'"{failing}"'))
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), target, f"VENV={folder / 'venv'}", f"PYTHON={python}", "ARGS=--now"]
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
