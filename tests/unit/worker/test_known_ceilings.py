"""Ceilings are measured once and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.worker import known_ceilings as module
from headway.worker.ceilings import Ceilings
from headway.worker.known_ceilings import known_ceilings

FOUND = Ceilings(1e10, 2e11, "int8")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The formats that were measured."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    formats: list[str] = []

    def measure(device_name: str, dtype_name: str) -> Ceilings:
        formats.append(dtype_name)
        return FOUND

    monkeypatch.setattr(module, "measure_ceilings", measure)
    return formats


def test_each_format_is_measured_once(measured: list[str]) -> None:
    for _ in range(2):
        assert known_ceilings("cpu", "float32") == FOUND
        assert known_ceilings("cpu", "int8") == FOUND
    assert measured == ["float32", "int8"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text("{"),
        lambda file: file.write_text("[1]"),
        lambda file: file.write_text(file.read_text().replace("flops_s", "flips_s")),
        lambda file: file.chmod(0o666),
    ],
    ids=["not JSON", "no object", "other fields", "others may have written it"],
)
def test_what_cannot_be_read_is_measured_again(
    measured: list[str], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    known_ceilings("cpu", "float32")
    (file,) = tmp_path.rglob("ceilings.json")
    damage(file)
    assert known_ceilings("cpu", "float32") == FOUND
    assert known_ceilings("cpu", "float32") == FOUND
    assert measured == ["float32"] * 2


def test_without_a_folder_every_start_measures(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "file"))
    assert [known_ceilings("cpu", "float32") for _ in range(2)] == [FOUND] * 2
    assert measured == ["float32"] * 2


def test_without_room_there_are_none(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_room(device_name: str, dtype_name: str) -> Ceilings:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "measure_ceilings", has_no_room)
    assert known_ceilings("cpu", "float32") is None
