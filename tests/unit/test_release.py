"""What a release is checked for before it is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway import __version__
from tests.unit.test_docs import load_script

ROOT = Path(__file__).resolve().parents[2]
check_tag = load_script(ROOT / "release" / "check_tag.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The two files that know the version, with a section of the changelog for it."""
    home = tmp_path / "src" / "headway" / "__init__.py"
    home.parent.mkdir(parents=True)
    home.write_text((ROOT / "src" / "headway" / "__init__.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{__version__}] - 2026-11-19\n")
    return tmp_path


def test_a_tag_of_the_version_with_a_section_of_the_changelog_is_good(tree: Path) -> None:
    assert check_tag.problem_with(f"v{__version__}", tree) is None


@pytest.mark.parametrize("tag", [__version__, "v9.9.9", f"v{__version__}.1"])
def test_another_tag_is_refused(tree: Path, tag: str) -> None:
    assert f"so the tag is v{__version__}" in check_tag.problem_with(tag, tree)


def test_a_changelog_without_the_version_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("## [Unreleased]\n")
    assert "CHANGELOG.md has no section" in check_tag.problem_with(f"v{__version__}", tree)


def test_workflows_run_scripts_that_exist() -> None:
    workflows = list((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) >= 2
    for workflow in workflows:
        for script in re.findall(r"release/\w+\.py|\.ci/\w+", workflow.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), (workflow.name, script)
