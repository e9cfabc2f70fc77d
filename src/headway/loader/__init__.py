"""Finding a model and opening it: Hugging Face folder, GGUF file, hub id, or a shape with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError, ModelNotFoundError

if TYPE_CHECKING:
    # This imports torch, which the server's front end avoids: it uses this module only for paths and tokenizers.
    from headway.models.checkpoint import Checkpoint

__all__ = ["LOAD_FORMATS", "download", "looks_like_hub_id", "open_checkpoint"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_IGNORED = ["consolidated*.safetensors", "original/*"]


def open_checkpoint(model: str | Path, load_format: str = "auto", *, seed: int = 0) -> Checkpoint:
    """Open `model`: a folder, a .gguf file, or a hub id (fetched if it is not in the hub cache).

    `auto` looks at what is there; `safetensors` and `gguf` insist on that format; `dummy` takes only the shape (a
    built-in name, a folder with a config.json, or a JSON file in that form) and makes up the weights, from `seed`.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"unknown load_format {load_format!r}; valid names are {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        from headway.loader.dummy import DummyCheckpoint

        return DummyCheckpoint(model, seed)
    path = Path(model).expanduser()
    try:
        if path.is_file():
            return _open_file(path, load_format)
        if path.is_dir():
            return _open_folder(path, load_format)
    except PermissionError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    return _open_hub(str(model), load_format)


def _open_file(path: Path, load_format: str) -> Checkpoint:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if load_format == "safetensors" or not (is_gguf or path.suffix == ".gguf"):
        raise ModelNotFoundError(
            f"{path} is a single file that is not GGUF; give the folder that holds config.json and the weights"
            if not is_gguf
            else f"{path} is a GGUF file, but load_format is 'safetensors'; use 'auto' or 'gguf'"
        )
    from headway.loader.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _open_folder(folder: Path, load_format: str, name: str | None = None) -> Checkpoint:
    if load_format == "gguf" or not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1 and load_format != "safetensors":
            return _open_file(files[0], load_format)
        if len(files) > 1:
            listed = ", ".join(file.name for file in files)
            raise ModelNotFoundError(f"{folder} has several GGUF files; give the path of one of them: {listed}")
        if load_format == "gguf":
            raise ModelNotFoundError(f"{folder} has no .gguf file, but load_format is 'gguf'")
    from headway.loader.hf_folder import HFFolderCheckpoint

    return HFFolderCheckpoint(folder, name)


def _open_hub(model: str, load_format: str) -> Checkpoint:
    from headway.loader.dummy import BUILTIN_SHAPES

    if model in BUILTIN_SHAPES:
        raise ModelNotFoundError(f"{model!r} is a shape without weights; use it with load_format 'dummy'")
    if load_format == "gguf" or not looks_like_hub_id(model):
        raise ModelNotFoundError(f"no file or folder {model!r}; give a model folder, a .gguf file, or a hub id")
    return _open_folder(download(model), load_format, name=model)


def looks_like_hub_id(model: str) -> bool:
    """`owner/name` or `name`; a path with other separators, or with a file's ending, is not one."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith((".gguf", ".json", ".safetensors"))


def download(model: str) -> Path:
    """The folder of a hub model, downloaded if it is not in the cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED))
    except Exception as error:  # the library raises its own, the HTTP client's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"no file or folder {model!r}, and fetching it from the Hugging Face hub failed: {reason}. "
            "Check the name and the network, or give the path of a local model folder or .gguf file"
        ) from error
