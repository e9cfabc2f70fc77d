"""The tokenizer of a model, without its weights and without torch."""

from __future__ import annotations

from pathlib import Path

from headway.config import ModelConfig
from headway.errors import ConfigError, ModelNotFoundError
from headway.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from headway.tokenizer.own_template import use_chat_template


def load_model_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The tokenizer that the engine uses, with the chat template that the options name, if they name one; None for a
    model that has none (only token ids can be sent then)."""
    tokenizer = _load(config)
    use_chat_template(tokenizer, config.chat_template)
    return tokenizer


def _load(config: ModelConfig) -> Tokenizer | None:
    if config.tokenizer is not None:
        return _from_elsewhere(config.tokenizer)
    if config.model is None:
        from headway.loader.embedded import embedded_model_path

        return _from_gguf(embedded_model_path())
    path = Path(config.model).expanduser()
    if config.load_format == "dummy":
        return tokenizer_from_folder(path) if (path / "tokenizer.json").is_file() else None
    if not path.exists():
        path = _from_hub(config.model)
    return _from_model(path, config.load_format)


def _from_elsewhere(source: str) -> Tokenizer:
    """A folder with tokenizer.json, or a GGUF file."""
    path = Path(source).expanduser()
    if path.is_dir():
        return tokenizer_from_folder(path)
    tokenizer = _from_gguf(path) if path.is_file() else None
    if tokenizer is None:
        raise ConfigError(f"'{source}' has no tokenizer.")
    return tokenizer


def _from_hub(model: str) -> Path:
    from headway.loader import download, looks_like_hub_id

    if not looks_like_hub_id(model):
        raise ModelNotFoundError(f"no file or folder {model!r}; give a model folder, a .gguf file, or a hub id")
    return download(model)


def _from_model(path: Path, load_format: str) -> Tokenizer | None:
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
