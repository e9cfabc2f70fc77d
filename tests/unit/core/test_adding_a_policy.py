"""docs/adding_a_policy.md is followed to the letter, in a copy of the package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adding_a_policy.md").read_text()
POLICY_FILE = "src/headway/core/policy/spf.py"
CONFIG_FILE = "src/headway/config.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is when the page has been followed as far as 'That is all'."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    policy, _ = blocks("python")
    assert f"`{POLICY_FILE}`" in PAGE and f"`{CONFIG_FILE}`" in PAGE
    (root / POLICY_FILE).write_text(policy)
    [diff] = blocks("diff")
    old, new = (line[1:] for line in diff.splitlines())
    config = (root / CONFIG_FILE).read_text()
    assert config.count(old) == 1, "the page shows another list of policies than config.py has"
    (root / CONFIG_FILE).write_text(config.replace(old, new))
    return root


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_schedule_is_the_one_on_the_page(checkout: Path) -> None:
    _, script = blocks("python")
    [printed] = blocks("text")
    done = run(checkout, "-c", script)
    assert done.stderr == ""
    assert done.stdout == printed


def test_fcfs_begins_as_the_page_says(checkout: Path) -> None:
    _, script = blocks("python")
    assert '"fcfs"` the first line would be `long:8`' in PAGE
    done = run(checkout, "-c", script.replace('"spf"', '"fcfs"'))
    assert done.stdout.splitlines()[0] == "long:8"


def test_the_commands_know_the_policy(checkout: Path) -> None:
    [commands] = blocks("sh")
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        assert program == "headway"
        done = run(checkout, "-m", "headway", *arguments, "--help-all")
        assert done.returncode == 0, done.stderr
        assert "spf" in done.stdout
    refused = run(checkout, "-m", "headway", "generate", "--scheduling-policy", "spff", "--help")
    assert refused.returncode != 0 and "spf" in refused.stderr


def test_the_policy_is_in_the_docs_of_options(checkout: Path) -> None:
    assert "prefix, spf." in run(checkout, "-m", "headway", "options", "--markdown").stdout


def test_the_page_names_every_hook_and_queue() -> None:
    from headway.core import queue
    from headway.core.policy import SchedulingPolicy

    for name in vars(SchedulingPolicy):
        if not name.startswith("_") and name not in ("name", "summary", "displaces", "divides_steps"):
            assert f"`{name}" in PAGE, f"{name} is not on the page"
    for name in queue.__all__:
        if name not in ("WaitingQueue", "GuardedQueue"):
            assert f"`{name}`" in PAGE, f"{name} is not on the page"
