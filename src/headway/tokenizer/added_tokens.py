"""Tokens that a model folder names beside those of tokenizer.json, added in the order in which transformers adds them.

tokenizer_config.json      bos_token and the like, any other `*_token`, `extra_special_tokens` (a list, or names
                           and tokens; formerly `additional_special_tokens`), `added_tokens_decoder` (by id)
special_tokens_map.json    the same but for the last; read only without `added_tokens_decoder`, and goes before
added_tokens.json          text and id; read only without `added_tokens_decoder`
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headway.errors import CorruptModelError
from headway.tokenizer.folder_files import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, read_json

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_DIGITS = 18


@dataclass(frozen=True)
class DeclaredTokens:
    """What the files declare."""

    named: Mapping[str, AddedToken]
    """Special tokens with names, e.g. `bos_token`."""
    extra: tuple[AddedToken, ...]
    """Special tokens without names."""
    by_id: Mapping[int, AddedToken]

    def add_to(self, backend: tokenizers.Tokenizer, *, vocab_size: int | None) -> None:
        """Add the tokens that `backend` lacks. A new token takes the next id. Tokens with ids from `vocab_size` on are
        left out, because the model has no embeddings for them."""
        known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
        texts = {token.content for token in backend.get_added_tokens_decoder().values()}
        added = [token for _, token in sorted(self.by_id.items()) if repr(token) not in known]
        texts |= {token.content for token in added}
        named = {token.content for token in self.named.values()}
        for token in added:
            token.special = token.special or token.content in named
        for token in (*self.named.values(), *self.extra):
            if token.content not in texts:
                texts.add(token.content)
                added.append(token)
        backend.add_tokens(_with_a_place(added, backend, vocab_size))
        self._log_other_ids(backend)

    def _log_other_ids(self, backend: tokenizers.Tokenizer) -> None:
        found = {
            token.content: (token_id, backend.token_to_id(token.content)) for token_id, token in self.by_id.items()
        }
        other = [f"{text} is {own}, not {said}" for text, (said, own) in found.items() if own not in (said, None)]
        if other:
            logger.warning(
                "tokens have other ids than the folder declares, as in transformers: %s", ", ".join(other[:5])
            )


def _with_a_place(tokens: list[AddedToken], backend: tokenizers.Tokenizer, vocab_size: int | None) -> list[AddedToken]:
    if vocab_size is None:
        return tokens
    last = max(backend.get_added_tokens_decoder(), default=-1)
    free = vocab_size - max(backend.get_vocab_size(with_added_tokens=False), last + 1)
    new = [token.content for token in tokens if backend.token_to_id(token.content) is None]
    outside = set(new[max(0, free) :])
    if outside:
        logger.warning("the model of %d tokens has no place for %s; left out", vocab_size, ", ".join(sorted(outside)))
    return [token for token in tokens if token.content not in outside]


def declared_tokens(folder: Path, config: Mapping[str, Any]) -> DeclaredTokens:
    """Read the declared tokens; `config` has the contents of tokenizer_config.json."""
    source = folder / TOKENIZER_CONFIG
    if config.get("added_tokens_decoder") is not None:
        by_id = _by_id(config["added_tokens_decoder"], source)
        named, extra = _special_tokens(config, source)
    else:
        named, extra = _special_tokens(_merged(config, read_json(folder / SPECIAL_TOKENS_MAP)), source)
        special = {token.content for name, token in named.items() if name in _NAMED_TOKENS}
        by_id = _from_added_tokens(folder / "added_tokens.json", special | {token.content for token in extra})
    as_declared = {token.content: token for token in by_id.values()}
    named = {name: as_declared.get(token.content, token) for name, token in named.items()}
    return DeclaredTokens(named, extra, by_id)


def _merged(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both files. The map takes precedence, except that unnamed tokens of both files count."""
    merged = {**config, **special_tokens_map}
    own = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    more = special_tokens_map.get("extra_special_tokens")
    if isinstance(own, list):
        merged["extra_special_tokens"] = [*own, *(more if isinstance(more, list) else ())]
    return merged


def _special_tokens(config: Mapping[str, Any], source: Path) -> tuple[dict[str, AddedToken], tuple[AddedToken, ...]]:
    """The special tokens with names, the usual ones first, and those without."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = config.get("model_specific_special_tokens") or {}
    by_name = {key: value for key, value in config.items() if _is_token(key, value)}
    for key, value in (("extra_special_tokens", extra), ("model_specific_special_tokens", more)):
        if isinstance(value, Mapping):
            by_name |= value
        elif not isinstance(value, list) or key != "extra_special_tokens":
            raise CorruptModelError(f"{source}: {key!r} is a {type(value).__name__}, not tokens")
    names = [
        *(name for name in _NAMED_TOKENS if name in by_name),
        *(name for name in by_name if name not in _NAMED_TOKENS),
    ]
    named = {name: _token(by_name[name], f"{source}: {name!r}", is_named=True) for name in names}
    others = extra if isinstance(extra, list) else []
    tokens = tuple(_token(value, f"{source}: 'extra_special_tokens'", is_named=False) for value in others)
    return {name: token for name, token in named.items() if token.content}, tuple(
        token for token in tokens if token.content
    )


def _is_token(key: str, value: Any) -> bool:
    """Whether a key names a special token: any `*_token` with a text or an object, and the usual ones with anything."""
    return key.endswith("_token") and (isinstance(value, (str, dict)) or (key in _NAMED_TOKENS and value is not None))


def _token(value: Any, place: str, *, is_named: bool) -> AddedToken:
    """A special token, given as a string or as an object with its `content` and flags. An object that says its type
    is special only if it says so or has a name."""
    if isinstance(value, str):
        return _added_token({"content": value, "special": True}, place)
    if not isinstance(value, Mapping):
        raise CorruptModelError(f"{place} has {value!r}, which is not a token")
    fields = {key: flag for key, flag in value.items() if key != "__type"}
    token = _added_token(fields if "__type" in value else fields | {"special": True}, place)
    token.special = token.special or is_named
    return token


def _added_token(fields: Mapping[str, Any], place: str) -> AddedToken:
    try:
        if isinstance(fields.get("content"), str):
            return AddedToken(**fields)
    except (TypeError, UnicodeEncodeError):  # a flag that is none; half of a surrogate pair
        pass
    raise CorruptModelError(f"{place} has {dict(fields)}, which is not a token")


def _by_id(value: Any, source: Path) -> dict[int, AddedToken]:
    place = f"{source}: 'added_tokens_decoder'"
    if not isinstance(value, Mapping):
        raise CorruptModelError(f"{place} is a {type(value).__name__}, not ids and tokens")
    found = {}
    for token_id, fields in value.items():
        is_id = token_id.isdecimal() and len(token_id) <= _MAX_DIGITS
        if not is_id or not isinstance(fields, Mapping):
            raise CorruptModelError(f"{place} has {fields!r} at {token_id!r}, which is not an id and a token")
        found[int(token_id)] = _added_token({key: flag for key, flag in fields.items() if key != "__type"}, place)
    return found


def _from_added_tokens(file: Path, special: set[str]) -> dict[int, AddedToken]:
    found = {}
    for text, token_id in read_json(file).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CorruptModelError(f"{file} gives {text!r} the id {token_id!r}, which is not one")
        is_special = text in special
        found[token_id] = _added_token(
            {"content": text, "normalized": not is_special, "special": is_special}, str(file)
        )
    return found
