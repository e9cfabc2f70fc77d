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

from headway.cli.flags import CommandParser
from headway.cli.main import COMMANDS, CommandGroup

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


run_examples = load_script(ROOT / "docs" / "run_examples.py")
SHOWN = [
    one
    for one in run_examples.examples()
    if one.kind == "sh" and one.text.startswith("headway") and "spf" not in one.text
]


@pytest.mark.parametrize("example", SHOWN, ids=[one.place for one in SHOWN])
def test_every_command_that_is_shown_has_options_that_exist(example: object) -> None:
    words = shlex.split(example.text.replace("\\\n", " "), comments=True)[1:]  # type: ignore[attr-defined]
    words = words[: words.index(">")] if ">" in words else [word for word in words if word != "&"]
    command = COMMANDS[words.pop(0)]
    if isinstance(command, CommandGroup):
        command = command.commands[words.pop(0)]
    parser = CommandParser(prog="headway")
    importlib.import_module(command.module).add_arguments(parser)
    parser.parse(words)  # ends the process at the first that does not


def test_examples_are_cut_into_commands() -> None:
    block = "# a comment\nheadway a \\\n    --b c   # why\n\ncurl x -d '{\n  1}'\nheadway d\n"
    assert run_examples.commands(block) == [
        (1, "headway a \\\n    --b c   # why"),
        (4, "curl x -d '{\n  1}'"),
        (6, "headway d"),
    ]


def test_examples_that_are_not_run_say_why() -> None:
    reasons = {one.text.split()[0]: one.why_not(False) for one in run_examples.examples() if one.kind == "sh"}
    assert reasons["make"] == "a make target (--make runs it)"
    assert reasons["compute-sanitizer"] == "needs a GPU"
    assert reasons["curl"] is None


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def test_every_number_of_the_readmes_tables_is_in_a_row_of_the_results() -> None:
    """Rounded as the README rounds it; memory in GB is a row's MB or MiB."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Results") : readme.index("## Layout")]
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


def _value(number: str) -> float:
    return float(number.replace(",", ""))
