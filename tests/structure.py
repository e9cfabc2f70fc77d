"""The shape of the source tree: its rooms, who imports whom, and what must not grow.

    .venv/bin/python -m tests.structure            # a table of all rooms: files, lines, classes, arrows, numbers
    .venv/bin/python -m tests.structure --lower    # write lower limits where the tree has shrunk; `make docs` does so

A room is a package, or a module that stands alone, directly below `headway` or `headway_lab`. An arrow leads from a
package to another that one of its files imports. The limits stand in `structure_limits.json`, and
`tests/unit/test_structure.py` compares. Files are read, not imported, so it works on a tree that cannot be imported.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "src"
PACKAGES = ("headway", "headway_lab")
LIMITS = Path(__file__).with_name("structure_limits.json")
MAX_LINES = 450
MAX_METHODS = 30
FILES, CLASSES = f"files over {MAX_LINES} lines", f"classes over {MAX_METHODS} methods"
NUMBERS, ARROWS = "numbers at module level", "arrows between rooms"


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: str
    """Below `src`."""
    tree: ast.Module
    num_lines: int

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        """`headway/core` of `headway/core/policy/base.py`, `headway/config` of `headway/config.py`."""
        return room_of(self.name)

    @cached_property
    def has_kernels(self) -> bool:
        """Kernels are long: all they need stands in one function, and what they share in one file."""
        return any(
            isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
            for node in self.tree.body
        )

    @property
    def classes(self) -> Iterator[tuple[str, int]]:
        """Each class and how many methods it defines."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node.name, sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)

    @property
    def num_numbers(self) -> int:
        """Names at module level that stand for a number."""
        values = [node.value for node in self.tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        return sum(value is not None and _is_number(value) for value in values)


@dataclass(frozen=True)
class Tree:
    """All source files."""

    modules: tuple[Module, ...]
    known: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", frozenset(module.name for module in self.modules))

    @classmethod
    def read(cls, sources: Path = SOURCES) -> Tree:
        modules = []
        for file in sorted(file for package in PACKAGES for file in (sources / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            path = file.relative_to(sources).as_posix()
            modules.append(Module(path=path, tree=ast.parse(text, path), num_lines=len(text.splitlines())))
        return cls(tuple(modules))

    def imports(self, module: Module) -> Iterator[str]:
        """Every module of the package that this one imports anywhere, functions and type checking included."""
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.known)
            elif isinstance(node, ast.ImportFrom) and node.module in self.known:
                for alias in node.names:
                    full_name = f"{node.module}.{alias.name}"
                    yield full_name if full_name in self.known else node.module

    @cached_property
    def arrows(self) -> set[tuple[str, str]]:
        """Pairs of packages of which the first imports the second."""
        packages = {module.room for module in self.modules if module.path.count("/") > 1}
        arrows = {(module.room, room_of(name)) for module in self.modules for name in self.imports(module)}
        return {(one, two) for one, two in arrows if one != two and {one, two} <= packages}

    def measured(self) -> dict[str, Any]:
        """What has a limit, as the limits are written down."""
        numbers = Counter[str]()
        for module in self.modules:
            numbers[module.room] += module.num_numbers
        modules = [module for module in self.modules if not module.has_kernels]
        return {
            ARROWS: len(self.arrows),
            NUMBERS: {room: count for room, count in sorted(numbers.items()) if count},
            FILES: {module.path: module.num_lines for module in modules if module.num_lines > MAX_LINES},
            CLASSES: {
                f"{module.path}:{name}": num_methods
                for module in modules
                for name, num_methods in module.classes
                if num_methods > MAX_METHODS
            },
        }


def room_of(name: str) -> str:
    """The room that a module stands in."""
    return "/".join(name.split(".")[:2])


def read_limits() -> dict[str, Any]:
    return json.loads(LIMITS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def excesses(measured: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """What is larger than it may be, and what to do about it."""
    found = []
    if measured[ARROWS] > limits[ARROWS]:
        found.append(
            f"{measured[ARROWS]} arrows between rooms, and {limits[ARROWS]} are allowed. Move what two rooms "
            "need below both, or hand it in as an argument. `python -m tests.structure` lists whom each room imports."
        )
    has_moved = sum(measured[NUMBERS].values()) <= sum(limits[NUMBERS].values())  # from one room to another
    for room, count in measured[NUMBERS].items():
        if count > (limit := limits[NUMBERS].get(room, 0)) and not has_moved:
            found.append(
                f"{room}: {count} numbers at module level, and {limit} are allowed. A measured number belongs into the "
                "room's Tuning record, a bound of input into its record of limits, and one that a single function uses "
                "into that function."
            )
    for kind, unit, advice in (
        (FILES, "lines", "Which second idea has moved in? It gets a file of its own."),
        (CLASSES, "methods", "Which second idea has moved in? It becomes an object that this one holds."),
    ):
        for name, count in measured[kind].items():
            exception = limits[kind].get(name)
            if exception is None:
                found.append(f"{name}: {count} {unit}. {advice}")
            elif count > exception["at most"]:
                found.append(f"{name}: {count} {unit}, and {exception['at most']} are allowed. {advice}")
    return found


def lowered(limits: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The limits, each no higher than what there is; exceptions that are needed no longer are gone."""
    return {
        ARROWS: min(limits[ARROWS], measured[ARROWS]),
        NUMBERS: {
            room: min(limit, measured[NUMBERS][room])
            for room, limit in limits[NUMBERS].items()
            if room in measured[NUMBERS]
        },
        **{
            kind: {
                name: {"at most": min(one["at most"], measured[kind][name]), "reason": one["reason"]}
                for name, one in limits[kind].items()
                if name in measured[kind]
            }
            for kind in (FILES, CLASSES)
        },
    }


def table(tree: Tree) -> str:
    """A line for each room, and the sum of each package."""
    lines = [f"{'':<26}{'files':>6}{'lines':>8}{'classes':>8}{'methods':>8}{'largest':>8}{'numbers':>8}  imports"]
    for package in PACKAGES:
        rooms = sorted({module.room for module in tree.modules if module.room.startswith(f"{package}/")})
        for room in (*rooms, package):
            inside = [module for module in tree.modules if f"{module.room}/".startswith(f"{room}/")]
            classes = [num_methods for module in inside for _, num_methods in module.classes]
            imported = sorted(two.removeprefix("headway/") for one, two in tree.arrows if one == room)
            lines.append(
                f"{room:<26}{len(inside):>6}{sum(one.num_lines for one in inside):>8}{len(classes):>8}"
                f"{sum(classes):>8}{max(classes, default=0):>8}{sum(one.num_numbers for one in inside):>8}  "
                + " ".join(imported)
            )
    return "\n".join([*lines, f"{len(tree.arrows)} arrows between rooms"])


def _is_number(node: ast.expr) -> bool:
    """`60`, `-1.0`, `64 * 2**20`."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lower", action="store_true", help="write lower limits where the tree has shrunk")
    tree = Tree.read()
    if parser.parse_args().lower:
        limits = lowered(read_limits(), tree.measured())
        LIMITS.write_text(json.dumps(limits, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        print(table(tree))


if __name__ == "__main__":
    main()
