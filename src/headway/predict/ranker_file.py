"""The file of a learned ranker: a line of JSON, then LightGBM's model as text. Reading it executes nothing.

{"format": "headway-length-predictor", "version": 1, "features": 2, "num_features": 1593, "objective": "regression",
 "calibration": {"scores": [...], "log_lengths": [...], "sigma": 0.6}, "training": {...},
 "model_bytes": 123456, "model_sha256": "..."}
tree
version=v4
...

LightGBM's parser trusts what it reads, so its text is checked first. Accepted is what training here produces: one
score, numerical splits, trees whose nodes follow their parents and point nowhere else. What LightGBM writes after the
trees (its parameters) is cut off when a model is made.

The calibration turns a score, which only orders, into the logarithm of a length. Between its points the line is
straight; beyond the outer ones it goes on with a small slope, so that no two scores become equal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.predict.base import PredictorFileError
from headway.predict.features import FEATURES_VERSION, NUM_FEATURES

END = "end of trees\n"
MOST_TREES = 5_000
MOST_LEAVES = 4_096

_HEADER = {
    "version": "v4",
    "num_class": "1",
    "num_tree_per_iteration": "1",
    "label_index": "0",
}
_OBJECTIVES = ("regression", "lambdarank")
_PER_SPLIT = ("split_feature", "split_gain", "threshold", "decision_type", "left_child", "right_child")
_PER_SPLIT_STATISTICS = ("internal_value", "internal_weight", "internal_count")
_PER_LEAF = ("leaf_value", "leaf_weight", "leaf_count")
_SINGLE = ("num_leaves", "num_cat", "is_linear", "shrinkage")
_TREE_KEYS = frozenset((*_PER_SPLIT, *_PER_SPLIT_STATISTICS, *_PER_LEAF, *_SINGLE))
OUTER_RISE = 0.02
"""How much the log length rises beyond the table, over a distance as wide as the table."""

Floats = npt.NDArray[np.float64]

FORMAT = "headway-length-predictor"
VERSION = 1
MOST_HEADER_BYTES = 2**20
MOST_FILE_BYTES = 64 * 2**20
MOST_CALIBRATION_POINTS = 1000


def without_parameters(model: str) -> str:
    """The model text up to the end of its trees, which is all that prediction needs."""
    return model[: model.index(END)] + END


def check_model(model: str, num_features: int) -> None:
    """Raise `ValueError` with the reason if this is not a sound model of that many features."""
    if not model.endswith(END) or "\r" in model:
        raise ValueError("the model is cut off")
    head, *trees = model.removesuffix(END).split("\n\nTree=")
    _check_head(head, num_features, len(trees))
    for number, text in enumerate(trees):
        index, _, body = text.partition("\n")
        if index != str(number):
            raise ValueError(f"tree {number} is numbered {index[:20]!r}")
        try:
            _check_tree(_fields(body), num_features)
        except ValueError as error:
            raise ValueError(f"tree {number}: {error}") from None
    _check_sizes(model, head, trees)


def _check_head(head: str, num_features: int, num_trees: int) -> None:
    first, _, rest = head.partition("\n")
    if first != "tree":
        raise ValueError("it does not begin as LightGBM's models do")
    fields = _fields(rest)
    for name, value in (_HEADER | {"max_feature_idx": str(num_features - 1)}).items():
        if fields.get(name) != value:
            raise ValueError(f"{name} is {fields.get(name)!r}, not {value!r}")
    if fields.get("objective", "").split(" ")[0] not in _OBJECTIVES:
        raise ValueError("its objective is not one of ours")
    for name in ("feature_names", "feature_infos"):
        if len(fields.get(name, "").split(" ")) != num_features:
            raise ValueError(f"{name} is not a list of {num_features}")
    if not 1 <= num_trees <= MOST_TREES:
        raise ValueError(f"it has {num_trees} trees, not 1 to {MOST_TREES}")


def _check_sizes(model: str, head: str, trees: Sequence[str]) -> None:
    """Check the tree sizes, which LightGBM uses as offsets to jump from tree to tree."""
    sizes = _fields(head.partition("\n")[2]).get("tree_sizes", "").split(" ")
    position = len(head) + 2
    for size, text in zip(sizes, trees):
        end = position + len("Tree=") + len(text) + 2
        if not size.isdecimal() or int(size) != min(end, len(model) - len(END)) - position:
            raise ValueError("tree_sizes is wrong")
        position = end
    if len(sizes) != len(trees):
        raise ValueError("tree_sizes is wrong")


def _check_tree(fields: Mapping[str, str], num_features: int) -> None:
    if unknown := fields.keys() - _TREE_KEYS:
        raise ValueError(f"unknown field {min(unknown)[:40]!r}")
    num_leaves = _whole(fields, "num_leaves", 1, MOST_LEAVES)
    _whole(fields, "num_cat", 0, 0)
    _whole(fields, "is_linear", 0, 0)
    _reals(fields, "shrinkage", 1)
    _reals(fields, "leaf_value", num_leaves)
    num_splits = num_leaves - 1
    if num_splits == 0:
        return
    for name in ("leaf_weight", "leaf_count"):
        _reals(fields, name, num_leaves)
    for name in ("split_gain", "threshold", *_PER_SPLIT_STATISTICS):
        _reals(fields, name, num_splits)
    _wholes(fields, "split_feature", num_splits, 0, num_features - 1)
    if any(kind & 1 for kind in _wholes(fields, "decision_type", num_splits, 0, 15)):
        raise ValueError("it has a categorical split")
    _check_shape(
        _wholes(fields, "left_child", num_splits, -num_leaves, num_splits - 1),
        _wholes(fields, "right_child", num_splits, -num_leaves, num_splits - 1),
    )


def _check_shape(left: Sequence[int], right: Sequence[int]) -> None:
    """Every node but the root, and every leaf, is the child of one node that comes before it: a tree, no cycle."""
    children = sorted((*left, *right))
    expected = [*range(-len(left) - 1, 0), *range(1, len(left))]
    if children != expected or any(0 <= child <= i for side in (left, right) for i, child in enumerate(side)):
        raise ValueError("its nodes do not form a tree")


def _fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in text.split("\n"):
        name, equals, value = line.partition("=")
        if line and (not equals or name in fields):
            raise ValueError(f"cannot read {line[:40]!r}")
        if line:
            fields[name] = value
    return fields


def _whole(fields: Mapping[str, str], name: str, least: int, most: int) -> int:
    return _wholes(fields, name, 1, least, most)[0]


def _wholes(fields: Mapping[str, str], name: str, count: int, least: int, most: int) -> list[int]:
    values = [int(value) for value in _values(fields, name, count)]
    if not all(least <= value <= most for value in values):
        raise ValueError(f"{name} is out of range")
    return values


def _reals(fields: Mapping[str, str], name: str, count: int) -> None:
    if not all(math.isfinite(float(value)) for value in _values(fields, name, count)):
        raise ValueError(f"{name} has a number that is not finite")


def _values(fields: Mapping[str, str], name: str, count: int) -> list[str]:
    values = fields.get(name, "").split(" ")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers, not {count}")
    return values


@dataclass(frozen=True)
class ScoreCalibration:
    """Both lists rise strictly. `sigma` is how far true log lengths scatter around the table."""

    scores: tuple[float, ...]
    log_lengths: tuple[float, ...]
    sigma: float

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.log_lengths) or len(self.scores) < 2:
            raise ValueError("the calibration table needs two columns of at least two numbers")
        for column in (self.scores, self.log_lengths):
            if not all(map(math.isfinite, column)) or not all(a < b for a, b in itertools.pairwise(column)):
                raise ValueError("the columns of the calibration table must rise")
        if not math.isfinite(self.sigma) or self.sigma < 0:
            raise ValueError("the scatter of the calibration table must be a number of at least 0")

    def log_lengths_of(self, scores: npt.ArrayLike) -> Floats:
        """The log length for each score."""
        values = np.asarray(scores, dtype=np.float64)
        beyond = values - np.clip(values, self.scores[0], self.scores[-1])
        slope = OUTER_RISE / (self.scores[-1] - self.scores[0])
        return np.asarray(np.interp(values, self.scores, self.log_lengths) + slope * beyond)


@dataclass(frozen=True)
class RankerModel:
    """A ranker with all that prediction needs, and information about its training."""

    objective: str
    booster_text: str
    calibration: ScoreCalibration
    training: Mapping[str, Any] = field(default_factory=dict)
    """Numbers about the training, for people."""


def save_ranker(model: RankerModel, path: str | Path) -> None:
    """Write the file atomically: readers see the old file or the new one, never a part."""
    body = model.booster_text.encode()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "features": FEATURES_VERSION,
        "num_features": NUM_FEATURES,
        "objective": model.objective,
        "calibration": {
            "scores": model.calibration.scores,
            "log_lengths": model.calibration.log_lengths,
            "sigma": model.calibration.sigma,
        },
        "training": dict(model.training),
        "model_bytes": len(body),
        "model_sha256": hashlib.sha256(body).hexdigest(),
    }
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(json.dumps(header, allow_nan=False).encode() + b"\n" + body)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PredictorFileError(f"Cannot write the length predictor '{path}': {error.strerror}.") from error


def load_ranker(path: str | Path) -> RankerModel:
    """Read and check a file; `PredictorFileError` says what is wrong with it."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise PredictorFileError(f"Cannot read the length predictor '{path}': {error.strerror}.") from error
    try:
        return _parse(content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"it has no '{error.args[0]}'" if isinstance(error, KeyError) else str(error)
        raise PredictorFileError(f"'{path}' is not a length predictor that can be used: {reason}.") from error


def _parse(content: bytes) -> RankerModel:
    if len(content) > MOST_FILE_BYTES:
        raise ValueError(f"it is larger than {MOST_FILE_BYTES >> 20} MiB")
    header = _header(content)
    body = content[content.index(b"\n") + 1 :]
    if header["model_bytes"] != len(body) or header["model_sha256"] != hashlib.sha256(body).hexdigest():
        raise ValueError("it is cut off or damaged")
    if header["objective"] not in ("regression", "lambdarank"):
        raise ValueError("its objective is not known")
    text = body.decode("ascii")
    check_model(text, NUM_FEATURES)
    table = header["calibration"]
    if len(table["scores"]) > MOST_CALIBRATION_POINTS:
        raise ValueError("its calibration table is too long")
    calibration = ScoreCalibration(
        tuple(map(_real, table["scores"])), tuple(map(_real, table["log_lengths"])), _real(table["sigma"])
    )
    training = header["training"]
    if not isinstance(training, dict):
        raise ValueError("its training numbers are not an object")
    return RankerModel(header["objective"], text, calibration, training)


def _header(content: bytes) -> dict[str, Any]:
    end = content.find(b"\n", 0, MOST_HEADER_BYTES)
    try:
        header = json.loads(content[:end]) if end > 0 else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it does not begin with the header of one; they are made by `headway train-predictor`")
    if header["version"] != VERSION:
        raise ValueError(f"its version is {header['version']!r}, and this program reads version {VERSION}")
    if header["features"] != FEATURES_VERSION or header["num_features"] != NUM_FEATURES:
        raise ValueError("it was trained on other features than this program makes; train it anew")
    return header


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("its calibration holds something that is not a number")
    return float(value)
