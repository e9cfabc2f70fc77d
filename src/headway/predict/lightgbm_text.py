"""A check of LightGBM's text models, before its parser sees them: that parser trusts what it reads.

Accepted is what training here produces: one score, numerical splits, trees whose nodes follow their parents and point
nowhere else. What LightGBM writes after the trees (its parameters) is cut off when a model is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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


def without_parameters(model: str) -> str:
    """The model up to the end of its trees, which is all that predicting needs."""
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
    """LightGBM jumps from tree to tree by these numbers."""
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
