"""A tokenizer from a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headway.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from headway.tokenizer.tokenizer import Tokenizer, surround_with

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_folder(path: str | Path) -> Tokenizer:
    """Build from `tokenizer.json` and, where they exist, the configuration files around it."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder with a tokenizer")
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(config, _read_json(folder / "special_tokens_map.json"))
    known = {name: token for name, token in named.items() if backend.token_to_id(token) is not None}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known.values()])
    if "add_bos_token" in config or "add_eos_token" in config:
        surround_with(
            backend,
            first=known.get("bos_token") if config.get("add_bos_token") else None,
            last=known.get("eos_token") if config.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend,
        eos_token_ids=_end_token_ids(folder, backend, known.get("eos_token")),
        bos_token_id=backend.token_to_id(known["bos_token"]) if "bos_token" in known else None,
        special_tokens=named,
        chat_templates=_chat_templates(folder, config),
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


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptModelError(f"{file} should hold a JSON object, not a {type(content).__name__}")
    return content


def _named_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Text of bos_token and the like; a token is given as a string or as an object with its `content`."""
    named: dict[str, str] = {}
    for config in configs:
        for name in _NAMED_TOKENS:
            token = config.get(name)
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str) and text:
                named.setdefault(name, text)
    return named


def _end_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """The ids that generation_config.json stops at and the tokenizer's own; config.json's if there are none."""
    ids = _id_list(_read_json(folder / "generation_config.json").get("eos_token_id"))
    own = None if eos_token is None else backend.token_to_id(eos_token)
    if own is not None:
        ids.append(own)
    return ids or _id_list(_read_json(folder / "config.json").get("eos_token_id"))


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A chat_template.jinja file wins over the configuration, as it does in transformers."""
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {item["name"]: item["template"] for item in value if isinstance(item, dict) and "template" in item}
    elif isinstance(value, Mapping):
        templates = {str(name): text for name, text in value.items() if isinstance(text, str)}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates
