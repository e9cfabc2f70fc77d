"""What the options name: the model, its path, the smaller model that guesses, and the tokenizer.

The front end uses this module only for paths and tokenizers, and so it imports torch with the first checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headway.config import ModelConfig
from headway.errors import ConfigError
from headway.loader import find_path, open_checkpoint
from headway.loader.hub import is_offline
from headway.loader.model_tokenizer import open_tokenizer, tokenizer_of
from headway.tokenizer import Tokenizer, tokenizer_from_folder
from headway.tokenizer.own_template import use_chat_template

if TYPE_CHECKING:
    from headway.models.checkpoint import Checkpoint


def open_model(config: ModelConfig) -> Checkpoint:
    """Open the model that the options name, or the embedded one if they name none."""
    return open_checkpoint(
        _name(config), config.load_format, seed=config.seed, revision=config.revision, offline=config.offline
    )


def open_draft(config: ModelConfig) -> Checkpoint | None:
    """Open the smaller model that guesses, if the options name one."""
    if config.draft_model is None:
        return None
    return open_checkpoint(config.draft_model, config.load_format, seed=config.seed, offline=config.offline)


def model_path(config: ModelConfig) -> Path:
    """The folder or file of the model that the options name."""
    return find_path(_name(config), config.load_format, revision=config.revision, offline=config.offline)


def _name(config: ModelConfig) -> str:
    if config.model is not None:
        return config.model
    if config.revision is not None:
        raise ConfigError("revision is for a model of the Hugging Face hub: give model, too.")
    from headway.loader.embedded import embedded_model_path

    return str(embedded_model_path(offline=is_offline(config.offline)))


def load_model_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The tokenizer that the engine uses, with the chat template that the options name, if they name one; None for a
    model that has none (only token ids can be sent then)."""
    tokenizer = _load(config)
    use_chat_template(tokenizer, config.chat_template)
    return tokenizer


def _load(config: ModelConfig) -> Tokenizer | None:
    if config.tokenizer is not None:
        return open_tokenizer(config.tokenizer)
    if config.model is not None and config.load_format == "dummy":
        path = Path(config.model).expanduser()
        return tokenizer_from_folder(path) if (path / "tokenizer.json").is_file() else None
    return tokenizer_of(model_path(config), config.load_format)
