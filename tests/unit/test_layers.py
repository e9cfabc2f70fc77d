"""Which module may import which: the contracts of pyproject.toml hold, and the core is pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headway"

# Standard library all the same, but with a clock, randomness, I/O, threads or processes behind it.
IMPURE = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "select", "selectors", "signal", "subprocess", "threading"),
    *("ctypes", "http", "io", "logging", "mmap", "os", "pathlib", "pickle", "shutil", "socket", "sqlite3", "ssl"),
    *("sys", "tempfile", "urllib"),
    *("datetime", "random", "secrets", "time", "uuid"),
}
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__"}
# Sampling parameters are carried, never read: their type is named for the type checker alone.
CORE_MAY_IMPORT = tuple(
    f"headway.{name}" for name in ("core", "config", "counters", "settings", "errors", "sampling_params")
)
# Records and options that every layer shares must not drag anything along.
PLAIN_MODULES = ("config", "errors", "kv_formats", "option_fields", "outputs", "sampling_params", "settings")


def imported_modules(file: Path) -> set[str]:
    """Every module a file imports anywhere in it, type-checking blocks and functions included."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            modules.add(node.module or "")
    return modules


CORE_FILES = sorted((PACKAGE / "core").rglob("*.py"))


def test_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_a_core_to_check() -> None:
    assert {"scheduler.py", "blocks.py", "request.py"} <= {file.name for file in CORE_FILES}


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_core_is_pure(file: Path) -> None:
    for module in imported_modules(file):
        top = module.split(".")[0]
        if top == "headway":
            assert module.startswith(CORE_MAY_IMPORT), f"core imports {module}"
        else:
            assert top in sys.stdlib_module_names, f"core imports {module}, which is not in the standard library"
            assert top not in IMPURE, f"core imports {module}: no clock, no randomness, no I/O there"
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & IMPURE_CALLS


@pytest.mark.parametrize("name", PLAIN_MODULES)
def test_shared_records_need_the_standard_library_only(name: str) -> None:
    for module in imported_modules(PACKAGE / f"{name}.py"):
        top = module.split(".")[0]
        if top == "headway":
            assert module.removeprefix("headway.") in PLAIN_MODULES, f"{name} imports {module}"
        else:
            assert top in sys.stdlib_module_names, f"{name} imports {module}"


def test_the_core_runs_without_torch() -> None:
    code = "import sys, headway.core; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
