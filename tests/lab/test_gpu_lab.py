"""The measurements that wait for a GPU: their commands have options that exist, and one that fails stops no other."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks import gpu_lab

from headway.cli.main import commands
from headway.console.commands import CommandGroup
from headway.console.flags import CommandParser
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.sim.sim_variants import parse_variants

ANSWER = {"options": {"max_num_seqs": 96, "target_itl_ms": 40.0}, "rate": 20.0, "replicas": 2}


def parsed(words: Sequence[str]) -> dict[str, object]:
    """The options of a `headway` command, as it reads them."""
    assert tuple(words[:3]) == gpu_lab.HEADWAY
    name, *others = words[3:]
    command = commands()[name]
    assert not isinstance(command, CommandGroup)
    parser = CommandParser(prog="headway")
    importlib.import_module(command.module).add_arguments(parser)
    return vars(parser.parse(list(others)))


@pytest.mark.parametrize("name", gpu_lab.PARTS)
def test_the_command_of_each_part_has_options_that_exist(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert parsed(command)["rate"] == gpu_lab.RATE
        return subprocess.CompletedProcess(list(command), 0, stdout=json.dumps(ANSWER))

    monkeypatch.setattr(gpu_lab.subprocess, "run", answered)
    command = gpu_lab.PARTS[name].command(gpu_lab.Places("data", tmp_path))
    if command[1].endswith(".py"):
        assert Path(command[1]).is_file()
        return
    options = parsed(command)
    assert set(options.get("names") or []) <= set(CLAIMS)
    parse_variants(options.get("variant") or [])  # type: ignore[arg-type]
    assert options.get("workload") is None or Path(str(options["workload"])).is_file()
    if name == "size":
        assert options["rate"] == 10.0 and options["max_num_seqs"] == 96, "a replica's share, with the answer's options"


def test_a_part_that_fails_stops_no_other_and_one_without_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(code: str, seconds: float = 30.0) -> gpu_lab.Part:
        return gpu_lab.Part("a question", seconds, lambda places: [sys.executable, "-S", "-c", code])

    parts = {"bad": part("raise SystemExit(3)"), "long": part("", 900.0), "good": part("")}
    monkeypatch.setattr(gpu_lab, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_lab.py", "--data-dir", "x", "--output", str(tmp_path), "--minutes", "5"])
    assert gpu_lab.main() == 1
    ended = capsys.readouterr().out.rstrip().split("\n")[-3:]
    for line, expected in zip(ended, ("failed with exit code 3", "left out: no time", "done"), strict=True):
        assert line.endswith(expected)
    assert (tmp_path / gpu_lab.KEPT.name).read_bytes() == gpu_lab.KEPT.read_bytes()
