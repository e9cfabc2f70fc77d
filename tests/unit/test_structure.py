"""The shape of the source tree: who imports whom, and which files a step passes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lab.bench.test_offline_bench import SHAPE

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headway"
MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for package in (PACKAGE, PACKAGE.with_name("headway_lab"))
    for file in sorted(package.rglob("*.py"))
}

MOST_CONFIG_MODULES = 13
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


def imports(file: Path) -> Iterator[str]:
    """Every module of the package that a file imports anywhere in it, functions and type checking included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in MODULES else node.module


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
    assert not circles({name: set(imports(file)) for name, file in MODULES.items()})


def test_few_modules_know_the_configuration_and_no_tensor_code_does() -> None:
    knowing = [name.split(".")[1:] for name, file in MODULES.items() if "headway.config" in imports(file)]
    assert sum(one[0] in ENGINE_PACKAGES for one in knowing if one) <= MOST_CONFIG_MODULES, knowing
    assert not [one for one in knowing if len(one) > 1 and one[0] in TENSOR_PACKAGES]


# ---- one step -------------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "follow_a_step.md"
LISTED = re.compile(r"^ *(\d+) ([a-z0-9_/]+\.py)$", re.MULTILINE)
ONLY_IN_HALF_PRECISION = ("layers/skinny_gemm.py",)
"""The traced step is in float32."""
TRACE = """
import sys
from pathlib import Path

import headway
from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.sampling_params import SamplingParams

root = str(Path(headway.__file__).parent) + "/"
engine = LLMEngine.from_config(EngineConfig.from_options(
    model=sys.argv[1], load_format="dummy", device="cpu", attention_backend="triton", dtype="float32",
    num_kv_blocks=32, block_size=16, max_num_seqs=4, max_num_batched_tokens=32,
))
engine.add_request("decode", [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.8, seed=1))
engine.step()
engine.add_request("prefill", list(range(60)), SamplingParams(max_tokens=2, temperature=0.8, seed=2))
engine.step()  # admits the second request and computes its first chunk

called = set()
def note(frame, event, arg):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        called.add(frame.f_code.co_filename.removeprefix(root))
sys.setprofile(note)
engine.core.step()  # a decode and a prefill chunk
sys.setprofile(None)
print(*sorted(called), sep="\\n")
"""


def test_the_page_lists_the_files_of_a_step(tmp_path: Path) -> None:
    """Those whose code runs in a step of the GPU's runner with a decode and a prefill chunk, and their lines."""
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(SHAPE))
    done = subprocess.run(
        [sys.executable, "-c", TRACE, str(shape)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    listed = {path: int(num_lines) for num_lines, path in LISTED.findall(PAGE.read_text(encoding="utf-8"))}
    files = [*done.stdout.split(), *ONLY_IN_HALF_PRECISION]
    found = {path: len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in files}
    assert listed.keys() == found.keys()
    assert {path for path, num_lines in found.items() if abs(num_lines - listed[path]) > 0.1 * num_lines} == set()
