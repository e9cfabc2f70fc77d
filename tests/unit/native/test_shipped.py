"""Libraries of a wheel: the fastest that this CPU can run is taken, and none that was compiled from other sources."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.native import build as build_module
from headway.native import shipped
from headway.native.build import ISA_VARIABLE, SOURCE_DIR, build, find_compilers, load_library
from headway.native.shipped import INSTRUCTION_SETS, cpu_flags, find_shipped, shipped_name, sources_hash

AVX2 = "fpu avx avx2 fma f16c bmi1 bmi2 abm movbe pclmulqdq"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
Cpu = Callable[[str], None]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, of which libraries for all instruction sets are shipped."""
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    folder, libraries = tmp_path / "csrc", tmp_path / "compiled"
    folder.mkdir(), libraries.mkdir()
    (folder / "a.c").write_text("int a;")
    for one in INSTRUCTION_SETS:
        (libraries / shipped_name(folder, sources_hash(folder).hexdigest(), one)).write_text(one.name)
    for module in (shipped, build_module):
        monkeypatch.setattr(module, "SHIPPED_DIR", libraries)
    return folder


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cpu:
    """Sets what /proc/cpuinfo says."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(shipped, "_CPU_INFO", info)
    return lambda text: info.write_text(f"{text}\n\nprocessor : 1\nflags : everything\n") and None


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (f"flags\t\t: {AVX512} avx512_vnni", "avx512-vnni"),
        (f"flags : {AVX512}", "avx512"),
        (f"flags : {AVX2} avx_vnni", "avx2-vnni"),
        (f"flags : {AVX2}", "avx2"),
        (f"flags : {AVX2.replace('movbe', '')}", None),
        ("Features : fp asimd crc32 atomics asimddp", "neon-dotprod"),
        ("Features : fp asimd crc32", "neon"),
        ("flags : fpu sse2", None),
    ],
)
def test_the_fastest_that_this_cpu_can_run(sources: Path, cpu: Cpu, info: str, expected: str | None) -> None:
    cpu(info)
    found = find_shipped(sources)
    assert (found.read_text() if found else None) == expected


def test_what_the_wheel_has_is_not_compiled(sources: Path, cpu: Cpu) -> None:
    cpu(f"flags : {AVX2}")
    result = build(folder=sources)
    assert result.is_shipped and not result.compiled and result.path.read_text() == "avx2"


@pytest.mark.parametrize("wish", ["native", "generic"])
def test_a_wish_for_an_instruction_set_is_compiled(
    sources: Path, cpu: Cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    cpu(f"flags : {AVX2}")
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(ISA_VARIABLE, wish)
    if not find_compilers():
        pytest.skip("no C compiler")
    result = build(folder=sources)
    assert result.compiled and not result.is_shipped


def test_a_changed_source_has_no_shipped_library(sources: Path, cpu: Cpu) -> None:
    cpu(f"flags : {AVX2}")
    (sources / "a.c").write_text("int b;")
    assert find_shipped(sources) is None


def test_a_tree_without_libraries_ships_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of a clone, or of the wheel for any platform."""
    monkeypatch.setattr(shipped, "SHIPPED_DIR", tmp_path / "none")
    assert find_shipped(SOURCE_DIR) is None


def test_a_shipped_library_that_belongs_to_another_user_is_loaded(
    sources: Path, cpu: Cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages often belong to root, and to a group that may write."""
    cpu(f"flags : {AVX2}")
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    if not find_compilers():
        pytest.skip("no C compiler")
    compiled = build("generic", folder=sources).path
    path = build(folder=sources).path
    path.write_bytes(compiled.read_bytes())
    path.chmod(0o777)
    assert load_library(path)._name == str(path)


def test_every_instruction_set_is_what_the_compiled_library_calls_itself() -> None:
    """`hw_isa` in the sources has each name; the flags of this machine's own CPU are found."""
    text = (SOURCE_DIR / "misc.c").read_text()
    assert all(f'"{one.name}"' in text for one in INSTRUCTION_SETS)
    if platform.system() == "Linux":
        assert cpu_flags()
