"""Tokenizers from files, without weights and without torch."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError
from headway.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf


def open_tokenizer(source: str) -> Tokenizer:
    """The tokenizer in a folder with tokenizer.json, or in a GGUF file."""
    path = Path(source).expanduser()
    if path.is_dir():
        return tokenizer_from_folder(path)
    tokenizer = _from_gguf(path) if path.is_file() else None
    if tokenizer is None:
        raise ConfigError(f"'{source}' has no tokenizer: name a folder with tokenizer.json, or a .gguf file.")
    return tokenizer


def tokenizer_of(path: Path, load_format: str) -> Tokenizer | None:
    """The tokenizer in a model's path. A folder counts as GGUF if `load_format` says so or it has only one GGUF
    file."""
    if path.is_file():
        return _from_gguf(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1 and (load_format == "gguf" or not (path / "config.json").is_file()):
        return _from_gguf(files[0])
    return tokenizer_from_folder(path) if (path / "tokenizer.json").is_file() else None


def _from_gguf(path: Path) -> Tokenizer | None:
    from headway.loader.gguf_file import GGUFFile

    metadata = GGUFFile(path).metadata
    return tokenizer_from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None
