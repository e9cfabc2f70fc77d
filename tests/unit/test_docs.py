"""What README and docs say is what there is: commands with their options, and numbers with their rows."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headway.cli.main import commands
from headway.console.commands import CommandGroup
from headway.console.flags import CommandParser
from headway.structured.tool_call_formats import TOOL_FORMATS
from headway_lab.sim.simulate import MOST_REPLICAS
from headway_lab.workload.input_files import MOST_TOKENS
from headway_lab.workload.workload import MOST_REQUESTS

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


run_examples = load_script(ROOT / "docs" / "run_examples.py")
load_script(ROOT / "docs" / "written_part.py")  # which the next one imports
layers = load_script(ROOT / "docs" / "layers.py")
server_options = load_script(ROOT / "docs" / "server_options.py")
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    if "results" not in path.relative_to(ROOT).parts
)
SHOWN = [
    one
    for one in run_examples.examples()
    if one.kind == "sh" and one.text.startswith("headway") and "spf" not in one.text
]


@pytest.mark.parametrize("example", SHOWN, ids=[one.place for one in SHOWN])
def test_every_command_that_is_shown_has_options_that_exist(example: object) -> None:
    words = shlex.split(example.text.replace("\\\n", " "), comments=True)[1:]  # type: ignore[attr-defined]
    words = words[: words.index(">")] if ">" in words else [word for word in words if word != "&"]
    command = commands()[words.pop(0)]
    if isinstance(command, CommandGroup):
        command = command.commands[words.pop(0)]
    parser = CommandParser(prog="headway")
    importlib.import_module(command.module).add_arguments(parser)
    parser.parse(words)  # ends the process at the first that does not


COUNTS = (
    ("CHANGELOG.md", r"tools in (\w+) formats", len(TOOL_FORMATS)),
    ("docs/workloads.md", r"at most ([\d,]+) tokens", MOST_TOKENS),
    ("docs/workloads.md", r"a workload ([\d,]+) requests", MOST_REQUESTS),
    ("docs/simulator.md", r"At most (\d+) replicas", MOST_REPLICAS),
)
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@pytest.mark.parametrize(("page", "pattern", "count"), COUNTS, ids=[pattern for _, pattern, _ in COUNTS])
def test_counts_in_the_text_are_those_of_the_code(page: str, pattern: str, count: int) -> None:
    [told] = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"))
    assert told.replace(",", "") == str(count) or told == WORDS[count - 1]


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def test_every_number_of_the_readmes_tables_is_in_a_row_of_the_results() -> None:
    """Rounded as the README rounds it; memory in GB is a row's MB or MiB."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Results") :].split("\n## ")[0]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    known = {_value(number) for number in NUMBER.findall(results)}
    sizes = {
        _value(n) * (1.0 if unit == "MB" else 1.048576) / 1e3 for n, unit in re.findall(r"([\d,]+) (MB|MiB)", results)
    }
    cells = [cell for line in section.splitlines() if line.startswith("|") for cell in line.split("|")[2:-1]]
    checked = 0
    for cell in cells:
        among = sizes if cell.strip().endswith("GB") else known
        for number in NUMBER.findall(cell):
            digits = len(number.partition(".")[2])
            assert any(round(value, digits) == _value(number) for value in among), f"{number} of '{cell.strip()}'"
            checked += 1
    assert checked > 40


@pytest.mark.parametrize("script", [layers, server_options], ids=lambda script: script.__name__)
def test_what_programs_write_is_current(script: ModuleType) -> None:
    assert script.PART.is_current(script.listing()), "run 'make docs'"


LINK = re.compile(r"\]\(([^)\s]+)\)")


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links_and_files_that_are_named_exist(path: Path) -> None:
    """A name without a folder may be any file's of the benchmarks or tests."""
    text = path.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        assert not anchor or anchor in _anchors(page), target
    for name in CODE_PATH.findall(text) if path.name != "CHANGELOG.md" else ():
        found = [ROOT / name, ROOT / "src" / name, ROOT / "src" / "headway" / name, ROOT / "benchmarks" / name]
        is_there = any(one.exists() for one in found) or ("/" not in name and any((ROOT / "tests").rglob(name)))
        assert is_there or name.endswith("/spf.py"), name


CODE_PATH = re.compile(r"`((?:src/headway|tests|benchmarks|docs)?/?[a-z_]+(?:/[a-z_0-9]+)*\.py)`")


def _value(number: str) -> float:
    return float(number.replace(",", ""))
