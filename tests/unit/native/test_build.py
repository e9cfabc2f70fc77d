"""Finding a compiler, the cache, and what is said when it does not work."""

from __future__ import annotations

import functools
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.cache_dir import cache_dir, private_folder, temporary_folder
from headway.errors import NativeBuildError
from headway.native import build as build_module
from headway.native import lib as lib_module
from headway.native.__main__ import main
from headway.native.build import build, cgroup_quota
from headway.native.lib import NativeLibrary, is_available


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


WRITES_A_LIBRARY = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'


@pytest.fixture
def only_cc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and no compiler but the one a test puts in $CC."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_no_compiler_says_what_to_install(only_cc: Path) -> None:
    with pytest.raises(NativeBuildError, match="pip install ziglang"):
        build()


def test_a_failing_compiler_is_quoted(only_cc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", fake_compiler(only_cc / "broken", "echo 'no such header' >&2; exit 3"))
    with pytest.raises(NativeBuildError, match=r"exited with 3:\nno such header"):
        build()
    assert not list(private_folder(only_cc / "cache").iterdir())


def test_the_next_compiler_is_tried_and_compiling_is_said_once(
    only_cc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", fake_compiler(only_cc / "broken", "exit 1"))
    fake_compiler(only_cc / "gcc", WRITES_A_LIBRARY)
    result = build("generic")
    assert result.compiled and result.compiler == (str(only_cc / "gcc"),)
    assert result.path.read_text() == "library\n"
    begun, *_, done = capsys.readouterr().err.splitlines()
    assert begun == "Compiling the CPU kernels: this happens once."
    assert done.startswith("Compiling the CPU kernels: done in ")
    assert not build("generic").compiled
    capsys.readouterr()
    monkeypatch.delenv("CC")
    assert not build("generic").compiled
    assert capsys.readouterr().err == ""


def test_file_name_depends_on_flags_and_sources(only_cc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(only_cc / "cc", WRITES_A_LIBRARY)
    sources = only_cc / "sources"
    sources.mkdir()
    monkeypatch.setattr(build_module, "SOURCE_DIR", sources)
    paths = set()
    for isa, source in (("generic", "int a;"), ("avx2", "int a;"), ("generic", "int b;")):
        (sources / "a.c").write_text(source)
        paths.add(build(isa).path)
    assert len(paths) == 3


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_text("not a library")
    with pytest.raises(NativeBuildError, match=r"broken\.so"):
        NativeLibrary(path)


def test_an_unwritable_cache_is_replaced_for_this_run_and_said_so(
    only_cc: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even root can write below a file."""
    (only_cc / "file").write_text("")
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(only_cc / "file" / "below"))
    temporary_folder.cache_clear()
    fake_compiler(only_cc / "cc", WRITES_A_LIBRARY)
    result = build("generic")
    assert result.compiled and result.path.read_text() == "library\n"
    assert result.path.parent.stat().st_mode & 0o077 == 0, "nobody else can put a library there"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert "\n" not in message and "for this run alone" in message
    assert f"{only_cc / 'file' / 'below'} (Not a directory); set HEADWAY_CACHE_DIR" in message
    again = build("generic")
    assert not again.compiled and again.path == result.path


def test_a_home_without_an_owner_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HEADWAY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_dir() == Path("/.cache/headway")


def test_kernels_that_are_not_there_are_said_to_be_missing_once(
    only_cc: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lib_module, "load", lib_module.load.__wrapped__)
    monkeypatch.setattr(lib_module, "is_available", functools.cache(is_available.__wrapped__))
    assert not lib_module.is_available() and not lib_module.is_available()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert "about 5 times as slow: The CPU kernels need a C compiler" in message and "\n" not in message


def test_kernels_without_vector_instructions_are_said_to_be_slow(
    generic: NativeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE_ISA", "generic")
    assert lib_module.load.__wrapped__().isa == "generic"
    assert "several times as slow: HEADWAY_NATIVE_ISA is generic" in caplog.text


def test_unknown_isa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE_ISA", "mmx")
    with pytest.raises(NativeBuildError, match="generic"):
        build()


def test_two_builds_at_once(only_cc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compile into an empty cache, neither sees the other's half-written files, nothing else is left behind."""
    started = only_cc / "started"
    script = f'/bin/echo x >> {started}; while [ "$(/usr/bin/wc -l < {started})" -lt 2 ]; do /bin/sleep 0.01; done; '
    monkeypatch.setenv("CC", fake_compiler(only_cc / "slow", script + WRITES_A_LIBRARY))
    with ThreadPoolExecutor(2) as pool:
        results = [future.result(timeout=60) for future in [pool.submit(build, "generic") for _ in range(2)]]
    assert [result.compiled for result in results] == [True, True]
    assert list(private_folder(only_cc / "cache").iterdir()) == [results[0].path]
    assert results[0].path.read_text() == "library\n"


def test_command_line_reports_what_it_did(fast: NativeLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    output = capsys.readouterr().out
    assert str(fast.path) in output and fast.isa in output


def test_cgroup_quota(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/container\n")
    for file, text, expected in (
        ("memory.max", "max", None),
        ("pod/container/cpu.max", "max 100000\n", None),
        ("pod/cpu.max", "250000 100000\n", 2.5),
        ("pod/container/cpu.max", "150000 100000\n", 1.5),
        ("cpu/cpu.cfs_period_us", "100000", 1.5),
        ("cpu/cpu.cfs_quota_us", "-1", 1.5),
        ("cpu/cpu.cfs_quota_us", "50000", 0.5),
    ):
        path = tmp_path / "root" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert cgroup_quota(tmp_path / "root", membership) == expected, file
