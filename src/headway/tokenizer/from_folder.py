"""A tokenizer from a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from headway.errors import CorruptModelError, HeadwayError, ModelNotFoundError, UnsupportedModelError
from headway.tokenizer.added_tokens import declared_tokens
from headway.tokenizer.folder_files import GENERATION_CONFIG, TOKENIZER_CONFIG, read_json, read_text
from headway.tokenizer.tokenizer import Tokenizer


def tokenizer_from_folder(path: str | Path) -> Tokenizer:
    """Build from `tokenizer.json` and, where they exist, the configuration files around it.

    Which tokens are put around a text is what tokenizer.json says, as in transformers 5 (decision 14).
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder with a tokenizer")
    backend = _read_backend(folder)
    config, model_config = read_json(folder / TOKENIZER_CONFIG), read_json(folder / "config.json")
    declared = declared_tokens(folder, config)
    vocab_size = model_config.get("vocab_size")
    declared.add_to(backend, vocab_size=vocab_size if isinstance(vocab_size, int) else None)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    ids = {name: backend.token_to_id(token.content) for name, token in declared.named.items()}
    return Tokenizer(
        backend,
        eos_token_ids=_end_token_ids(folder, ids.get("eos_token"), model_config),
        bos_token_id=ids.get("bos_token"),
        special_tokens={name: token.content for name, token in declared.named.items()},
        chat_templates=_templates_or_error(folder, config),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        has_sentencepiece = (folder / "tokenizer.model").is_file()
        hint = (
            "; its tokenizer.model (sentencepiece) alone is not supported: save the fast tokenizer next to it"
            if has_sentencepiece
            else ""
        )
        raise UnsupportedModelError(f"{folder} has no tokenizer.json, which is needed to turn text into tokens{hint}")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain exceptions
        raise CorruptModelError(f"{file} cannot be read: {error}") from error


def _end_token_ids(folder: Path, eos_token_id: int | None, model_config: Mapping[str, Any]) -> list[int]:
    """The ids that generation_config.json stops at and the tokenizer's own; config.json's if there are none."""
    file = folder / GENERATION_CONFIG
    ids = _id_list(read_json(file).get("eos_token_id"), file)
    if eos_token_id is not None:
        ids.append(eos_token_id)
    return ids or _id_list(model_config.get("eos_token_id"), folder / "config.json")


def _id_list(value: Any, file: Path) -> list[int]:
    """An id, a list of ids, or null."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise CorruptModelError(f"{file}: 'eos_token_id' is {value!r}, which is not a token id or a list of them")
    return list(values)


def _templates_or_error(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str] | HeadwayError:
    """The chat templates, or the error of reading them, which is raised when a template is first needed."""
    try:
        return _chat_templates(folder, config)
    except HeadwayError as error:
        return error


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A chat_template.jinja file wins over the configuration, as it does in transformers."""
    value = config.get("chat_template")
    named: list[tuple[Any, Any]] = []
    if isinstance(value, list):
        named = [
            (item.get("name"), item.get("template")) if isinstance(item, Mapping) else (item, None) for item in value
        ]
    elif isinstance(value, Mapping):
        named = list(value.items())
    elif value is not None:
        named = [("default", value)]
    for name, text in named:
        if not isinstance(name, str) or not isinstance(text, str):
            place = f"{folder / TOKENIZER_CONFIG}: 'chat_template'"
            raise CorruptModelError(f"{place} has an entry without the text of its 'name' or 'template'")
    templates = dict(named)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_text(file)
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = read_text(file)
    return templates
