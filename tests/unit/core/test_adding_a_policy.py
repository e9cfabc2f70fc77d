"""docs/adding_a_policy.md is followed to the letter, in a copy of the package."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.documented_edits import ROOT, copied, documented_edits, make_edits

PAGE = (ROOT / "docs" / "adding_a_policy.md").read_text()
POLICY_FILE = "src/headway/core/policy/spf.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is when the page has been followed as far as 'That is all'."""
    root = tmp_path_factory.mktemp("checkout")
    copied(root, "src", "tests")
    policy, _ = blocks("python")
    assert f"`{POLICY_FILE}`" in PAGE
    (root / POLICY_FILE).write_text(policy)
    files = [make_edits(edits, root) for edits in documented_edits("adding_a_policy.md")]
    assert files == [{"src/headway/config.py"}, {"tests/property/brute_force_policies.py"}]
    return root


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
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
    assert ", spf." in run(checkout, "-m", "headway", "options", "--markdown").stdout


PLAY = """
import random
from tests.property.random_play import RandomPlay, crowded_world, small_world

for seed in range(6):
    rng = random.Random(seed)
    play = RandomPlay((small_world, crowded_world)[seed % 2](rng, "spf"), rng, max_in_flight=1 + seed % 3)
    play.play(num_steps=60)
"""


def test_the_policy_does_what_its_model_does(checkout: Path) -> None:
    done = run(checkout, "-c", PLAY)
    assert done.returncode == 0, done.stderr


def test_the_page_names_every_hook_and_queue() -> None:
    from headway.core import queue
    from headway.core.policy import SchedulingPolicy

    for name in vars(SchedulingPolicy):
        if not name.startswith("_") and name not in ("name", "summary", "displaces", "divides_steps"):
            assert f"`{name}" in PAGE, f"{name} is not on the page"
    for name in queue.__all__:
        if name not in ("WaitingQueue", "GuardedQueue"):
            assert f"`{name}`" in PAGE, f"{name} is not on the page"
