"""Completion scripts: every command and option, values by their kind, and shells that can read them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from headway.cli import main
from headway.cli.completion import SHELLS, completion_script
from headway.console.commands import Command, CommandGroup, Commands
from headway.console.flags import engine_flags

CASES = {
    "a command": ("headway gen", {"generate"}),
    "a command of the lab": ("headway si", {"sim", "sim-check", "size"}),
    "a command of a group": ("headway bench ca", {"capacity"}),
    "an option": ("headway serve --ssl", {"--ssl-certfile", "--ssl-keyfile"}),
    "an option that only --help-all shows": ("headway sim --starv", {"--starvation-ms", "--starvation-stretch"}),
    "an option of a command in a group": ("headway bench serve --max-conc", {"--max-concurrency"}),
    "a choice": ("headway serve --dtype float3", {"float32"}),
    "a shipped calibration": (
        "headway sim --calibration h200-llama31-8b-",
        {"h200-llama31-8b-tp2", "h200-llama31-8b-tp4"},
    ),
    "a shipped workload": ("headway sim --workload chat", {"chat_lognormal"}),
    "a shipped workload as a positional": ("headway workload anys", {"anyscale"}),
    "a file": ("headway serve --ssl-keyfile pri", {"private.pem"}),
    "a shell": ("headway completion z", {"zsh"}),
    "nothing to say": ("headway serve --port 8", set()),
}


@functools.cache
def script(shell: str) -> str:
    return completion_script(shell)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "private.pem").write_text("")
    for shell in SHELLS:
        (tmp_path / f"script.{shell}").write_text(script(shell))
    return tmp_path


def run(shell: str, code: str, folder: Path) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([shell, *flags, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_bash(case: str, folder: Path) -> None:
    line, expected = CASES[case]
    words = line.split(" ")
    code = (
        "source script.bash; compopt() { :; }\n"
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_headway\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert set(run("bash", code, folder).split()) == expected


@pytest.mark.parametrize("case", CASES)
def test_fish(case: str, folder: Path) -> None:
    line, expected = CASES[case]
    found = run("fish", f"source script.fish; complete --do-complete '{line}'", folder)
    assert {line.split("\t")[0] for line in found.splitlines()} == expected


def test_zsh_reads_the_script(folder: Path) -> None:
    code = "autoload -U compinit; compinit -D; source ./script.zsh 2>/dev/null; whence -w _shtab_headway"
    assert run("zsh", code, folder).strip() == "_shtab_headway: function"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_the_script(shell: str) -> None:
    def names(known: Commands) -> set[str]:
        below = [one.commands for one in known.values() if isinstance(one, CommandGroup)]
        return set(known).union(*map(names, below))

    assert all(name in script(shell) for name in names(main.commands()))
    flags = [spec.flag.removeprefix("--") for spec in engine_flags()]
    assert all(flag in script(shell) for flag in flags)


def test_an_installed_package_s_commands_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Commands = {"other": Command("headway.cli.version", "100% another package's.")}
    monkeypatch.setattr("headway.cli.completion.commands", lambda: other)
    assert "_shtab_headway_other_option_strings=(-h --help --short)" in completion_script("bash")


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["completion", "tcsh"])
    assert "choose from" in capsys.readouterr().err
