"""Finding a model and opening it: Hugging Face folder, GGUF file, hub id, or a shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError, ModelNotFoundError
from headway.loader.builtin_shapes import BUILTIN_SHAPES
from headway.loader.hub import HubModel, find_model

if TYPE_CHECKING:
    # This imports torch, which the server's front end avoids: it uses this module only for paths and tokenizers.
    from headway.models.checkpoint import Checkpoint

__all__ = ["LOAD_FORMATS", "find_path", "open_checkpoint"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def open_checkpoint(
    model: str | Path, load_format: str = "auto", *, seed: int = 0, revision: str | None = None, offline: bool = False
) -> Checkpoint:
    """Open `model`: a folder, a .gguf file, or a hub id (fetched if it is not in the hub cache).

    `auto` looks at what is there; `safetensors` and `gguf` insist on that format; `dummy` takes only the shape (a
    built-in name, a folder with a config.json, or a JSON file in that form) and makes up the weights, from `seed`.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"unknown load_format {load_format!r}; valid names are {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        from headway.loader.dummy import DummyCheckpoint

        _refuse_revision(revision, f"random weights of {model}")
        return DummyCheckpoint(model, seed)
    path = find_path(model, load_format, revision=revision, offline=offline)
    name = None if path == Path(model).expanduser() else str(model)
    try:
        if path.is_file():
            return _open_file(path, load_format, name)
        return _open_folder(path, load_format, name)
    except PermissionError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error


def find_path(
    model: str | Path, load_format: str = "auto", *, revision: str | None = None, offline: bool = False
) -> Path:
    """The folder or file of a model: a path, or a hub id, which is fetched if the cache does not have it."""
    path = Path(model).expanduser()
    try:
        is_here = path.exists()
    except PermissionError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    if is_here:
        _refuse_revision(revision, str(model))
        return path
    if model in BUILTIN_SHAPES:
        raise ModelNotFoundError(f"{str(model)!r} is a shape without weights; use it with load_format 'dummy'")
    on_hub = HubModel.parse(str(model), revision)
    if on_hub is None:
        raise ModelNotFoundError(f"no file or folder {str(model)!r}; give a model folder, a .gguf file, or a hub id")
    return find_model(on_hub, load_format, offline=offline)


def _refuse_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision is for models of the Hugging Face hub, and the model is {model}.")


def _open_file(path: Path, load_format: str, name: str | None = None) -> Checkpoint:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if load_format == "safetensors" or not (is_gguf or path.suffix == ".gguf"):
        raise ModelNotFoundError(
            f"{path} is a single file that is not GGUF; give the folder that holds config.json and the weights"
            if not is_gguf
            else f"{path} is a GGUF file, but load_format is 'safetensors'; use 'auto' or 'gguf'"
        )
    from headway.loader.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path, name)


def _open_folder(folder: Path, load_format: str, name: str | None = None) -> Checkpoint:
    if load_format == "gguf" or not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1 and load_format != "safetensors":
            return _open_file(files[0], load_format, name)
        if len(files) > 1:
            listed = ", ".join(file.name for file in files)
            raise ModelNotFoundError(f"{folder} has several GGUF files; give the path of one of them: {listed}")
        if load_format == "gguf":
            raise ModelNotFoundError(f"{folder} has no .gguf file, but load_format is 'gguf'")
    from headway.loader.hf_folder import HFFolderCheckpoint

    return HFFolderCheckpoint(folder, name)
