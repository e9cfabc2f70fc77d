"""Chooses the files of a repository that Headway reads: nothing else of it is fetched.

A folder's files are its configuration, its tokenizer and its safetensors files. Instead, a GGUF file alone is a whole
model. Repositories with GGUF files often have the same model in a dozen quantisations, of which one has to be named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from headway.loader.folder_files import (
    CONFIG_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    TOKENIZER_NAMES,
    indexed_names,
    weight_names,
)
from headway.loader.hub.model_id import HubModel

_READ = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_GGUF = ".gguf"
_TEMPLATES = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_QUANTISATION = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP\d\w*|TQ\d\w*))$", re.IGNORECASE)
_SPLIT = re.compile(r"-\d+-of-\d+$")
_NOT_MODELS = ("mmproj", "imatrix")
"""What GGUF files begin with that hold a part for images, or measurements for quantising."""


@dataclass(frozen=True)
class Choice:
    """The files of a model: of a folder, or one GGUF file."""

    small: tuple[str, ...]
    """All but the weights. They are fetched first, so that where weights are whole, all else is there too."""
    known_weights: tuple[str, ...] | None
    """The files with weights; `None` if the index, which is among the small files, names them."""
    is_gguf: bool = False

    def weights(self, folder: Path) -> tuple[str, ...]:
        """The files with weights, where the small ones are in `folder`."""
        return tuple(indexed_names(folder / INDEX_NAME)) if self.known_weights is None else self.known_weights


def choose(model: HubModel, names: Collection[str], load_format: str, sizes: Mapping[str, int] | None = None) -> Choice:
    """Choose among the names of all files. `sizes` are for error messages. Raises an error if there is nothing that
    Headway reads, or if the model's name leaves several possibilities."""
    top = {name for name in names if "/" not in name}
    ggufs = sorted(name for name in top if name.lower().endswith(_GGUF) and not name.lower().startswith(_NOT_MODELS))
    if model.part is not None and load_format == "safetensors":
        raise ConfigError(f"'{model}' names a GGUF file, but load_format is 'safetensors'; use 'auto' or 'gguf'.")
    has_folder = CONFIG_NAME in top and any(name.endswith(".safetensors") for name in top)
    if model.part is not None or load_format == "gguf" or (load_format == "auto" and ggufs and not has_folder):
        return Choice((), (_one_gguf(model, ggufs, sizes or {}),), is_gguf=True)
    if CONFIG_NAME not in top:
        raise ModelNotFoundError(f"{model} is not a model that Headway reads: it has no {CONFIG_NAME} and no GGUF file")
    has_index = INDEX_NAME in top and SINGLE_NAME not in top
    small = [name for name in _READ if name in top]
    small += [name for name in TOKENIZER_NAMES if name in top][:1]
    small += sorted(name for name in names if _TEMPLATES.fullmatch(name))
    small += [INDEX_NAME] if has_index else []
    return Choice(tuple(small), None if has_index else tuple(weight_names(top, list, where=str(model))))


def quantisation(file_name: str) -> str | None:
    """The quantisation that a GGUF file's name ends with."""
    match = _QUANTISATION.search(_SPLIT.sub("", _stem(file_name)))
    return match[1] if match else None


def _one_gguf(model: HubModel, ggufs: list[str], sizes: Mapping[str, int]) -> str:
    if not ggufs:
        raise ModelNotFoundError(f"{model.repo} has no GGUF file; without load_format 'gguf' its other files are read")
    found = ggufs if model.part is None else [name for name in ggufs if _is_meant(name, model.part)]
    whole = [name for name in found if not _SPLIT.search(_stem(name))]
    if len(whole) == 1:
        return whole[0]
    if found and not whole:
        raise UnsupportedModelError(
            f"the GGUF file {found[0]} of {model.repo} is one part of several, which Headway does not read; choose "
            "another one, or merge the parts with llama-gguf-split and give the path of the result"
        )
    why = "has several GGUF files" if model.part is None or whole else f"has no GGUF file '{model.part}'"
    tags = Counter(map(quantisation, ggufs))
    listed = (_entry(model, name, is_unique=tags[quantisation(name)] == 1, size=sizes.get(name)) for name in ggufs)
    raise ModelNotFoundError(f"{model.repo} {why}; name one of these: {', '.join(listed)}")


def _is_meant(name: str, part: str) -> bool:
    return name == part or (quantisation(name) or "").lower() == part.lower()


def _entry(model: HubModel, name: str, *, is_unique: bool, size: int | None) -> str:
    """How a user names this file."""
    part = quantisation(name) if is_unique else None
    return f"{model.repo}:{part or name}" + ("" if size is None else f" ({size / 1e9:.1f} GB)")


def _stem(file_name: str) -> str:
    return file_name[: -len(_GGUF)]
