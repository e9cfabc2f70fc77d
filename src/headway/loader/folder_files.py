"""Which files of a model's folder are read, by their names: the same rules for a folder and for a model of the hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from headway.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PICKLE_ENDINGS = (".bin", ".pt", ".pth")


def has_tokenizer(names: Collection[str]) -> bool:
    """Whether a file with a tokenizer is among these."""
    return any(name in names for name in TOKENIZER_NAMES)


def require_config(folder: Path) -> Path:
    """The folder's config.json. Raises an error that lists what the folder holds if it has none."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        found = sorted(entry.name for entry in folder.iterdir())
        listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing"
        raise ModelNotFoundError(f"{folder} is not a model: it has no {CONFIG_NAME} (it contains {listed})")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The folder's files with weights. Raises an error if it has none, or not all of them."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    if SINGLE_NAME in names and INDEX_NAME in names:
        logger.warning("%s has %s and %s; only the former is read", folder, SINGLE_NAME, INDEX_NAME)
    wanted = weight_names(names, lambda: indexed_names(folder / INDEX_NAME), where=str(folder))
    absent = [name for name in wanted if name not in names]
    if absent:
        raise CorruptModelError(
            f"{folder} is incomplete: {INDEX_NAME} lists {len(wanted)} files, of which {', '.join(absent[:3])}"
            f"{' and others' if len(absent) > 3 else ''} are missing; download the model again"
        )
    return [folder / name for name in wanted]


def weight_names(names: Collection[str], indexed: Callable[[], list[str]], *, where: str) -> list[str]:
    """The names of the files with weights among `names`: the single file, or else those of the index, or else all, as
    transformers chooses. `indexed` reads the index. `where`: the folder or repository, for errors."""
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    if INDEX_NAME in names:
        return indexed()
    # Mistral ships the same weights a second time, in another layout, as consolidated*.safetensors.
    found = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("consolidated"))
    if found:
        return found
    pickles = sorted(name for name in names if name.endswith(_PICKLE_ENDINGS))
    if pickles:
        raise UnsupportedModelError(
            f"{where} has its weights only as pickle files ({pickles[0]}), which can run code when opened; "
            "convert them to safetensors, for instance by loading and saving the model with transformers"
        )
    raise ModelNotFoundError(f"{where} has a {CONFIG_NAME} but no weights: no *.safetensors file")


def indexed_names(path: Path) -> list[str]:
    """The names of the files that an index lists."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CorruptModelError(f"{path} has no `weight_map`")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CorruptModelError(f"{path} names a file outside the folder: {outside[0]}")
    return names
