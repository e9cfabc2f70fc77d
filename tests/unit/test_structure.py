"""The shape of the source tree: no circle of imports, nothing above its limit, and the files that a step passes."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

from tests import structure
from tests.structure import ARROWS, CLASSES, FILES, MAX_LINES, MAX_METHODS, NUMBERS, Tree

ROOT = Path(__file__).parents[2]
TREE = Tree.read()

MOST_CONFIG_MODULES = 14
# The way of the configuration down to the kernels. Commands, the server and the lab make one, and hand it over.
ENGINE_PACKAGES = (
    "llm",
    "async_llm",
    "front",
    "engine_process",
    "engine",
    "executor",
    "worker",
    "runner",
    "loader",
    "models",
    "core",
)
TENSOR_PACKAGES = ("runner", "models", "layers", "attention", "quantization", "kv", "native")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that are left when those without imports are taken away again and again, and those that none imports."""
    left = {name: {one for one in found if one != name} for name, found in graph.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        done = {name for name, found in left.items() if not found & left.keys() or name not in imported}
        if not done:
            return [[name, *sorted(found & left.keys())] for name, found in sorted(left.items())]
        for name in done:
            del left[name]
        if not left:
            return []


def test_no_circle_of_imports() -> None:
    assert not circles({module.name: set(TREE.imports(module)) for module in TREE.modules})


def test_few_modules_know_the_configuration_and_no_tensor_code_does() -> None:
    knowing = [module.name.split(".")[1:] for module in TREE.modules if "headway.config" in TREE.imports(module)]
    assert sum(one[0] in ENGINE_PACKAGES for one in knowing if one) <= MOST_CONFIG_MODULES, knowing
    assert not [one for one in knowing if len(one) > 1 and one[0] in TENSOR_PACKAGES]


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_nothing_is_larger_than_its_limit() -> None:
    found = structure.excesses(TREE.measured(), structure.read_limits())
    assert not found, "\n".join(found)


def test_exceptions_are_above_the_common_limit_and_have_a_reason() -> None:
    limits = structure.read_limits()
    for kind, most in ((FILES, MAX_LINES), (CLASSES, MAX_METHODS)):
        for name, one in limits[kind].items():
            assert one["at most"] > most and one["reason"].strip(), name


def test_what_is_larger_is_found_and_limits_only_fall(tmp_path: Path) -> None:
    for path, text in {
        "headway/__init__.py": "",
        "headway/errors.py": "MOST = 64 * 2**20\nRATIO: float = -0.5\nNAME = 'x'\nIS_ON = True\n",
        "headway/core/long.py": "from headway.errors import RATIO\n" + "\n" * MAX_LINES,
        "headway/layers/kernels.py": "import headway.core.long\n@triton.jit\ndef run(): ...\n" + "\n" * MAX_LINES,
        "headway_lab/broad.py": "class Broad:\n" + "".join(f" def f{i}(self): ...\n" for i in range(MAX_METHODS + 1)),
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    measured = Tree.read(tmp_path).measured()
    assert measured == {
        ARROWS: 1,
        NUMBERS: {"headway/errors": 2},
        FILES: {"headway/core/long.py": MAX_LINES + 1},
        CLASSES: {"headway_lab/broad.py:Broad": MAX_METHODS + 1},
    }
    exception = {"reason": "all of one thing"}
    limits = {
        ARROWS: 2,
        NUMBERS: {"headway/errors": 3, "headway/gone": 1},
        FILES: {"headway/core/long.py": {"at most": 600, **exception}, "gone.py": {"at most": 600, **exception}},
        CLASSES: {"headway_lab/broad.py:Broad": {"at most": 40, **exception}},
    }
    assert structure.excesses(measured, limits) == []
    lower = structure.lowered(limits, measured)
    assert lower == {
        ARROWS: 1,
        NUMBERS: {"headway/errors": 2},
        FILES: {"headway/core/long.py": {"at most": MAX_LINES + 1, **exception}},
        CLASSES: {"headway_lab/broad.py:Broad": {"at most": MAX_METHODS + 1, **exception}},
    }
    assert structure.lowered(lower, measured) == lower
    grown = copy.deepcopy(measured)
    grown[ARROWS] += 1
    grown[NUMBERS]["headway/errors"] += 1
    grown[NUMBERS]["headway/new"] = 1
    grown[FILES]["headway/core/long.py"] += 1
    grown[CLASSES]["headway_lab/broad.py:Second"] = MAX_METHODS + 1
    found = structure.excesses(grown, lower)
    assert [one.split(":")[0] for one in found[1:]] == [
        *("headway/errors", "headway/new", "headway/core/long.py", "headway_lab/broad.py")
    ]
    assert structure.lowered(lower, grown) == lower


# ---- one step -------------------------------------------------------------------------------------------------------


def test_the_page_lists_the_files_of_a_step() -> None:
    """Those whose code runs in a step of the GPU's runner with a decode and a prefill chunk."""
    script = ROOT / "docs" / "follow_a_step.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
