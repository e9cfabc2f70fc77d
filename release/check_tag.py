"""Checks that a tag names the version of this tree: `python release/check_tag.py v0.1.0`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problem_with(tag: str, root: Path = ROOT) -> str | None:
    """What is wrong with a release under this tag; `None` if nothing is."""
    source = (root / "src" / "headway" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    if version is None:
        return "src/headway/__init__.py has no __version__"
    if tag != f"v{version[1]}":
        return f"the tag {tag} does not name the version: __version__ is {version[1]}, so the tag is v{version[1]}"
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version[1])}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        return f"CHANGELOG.md has no section '## [{version[1]}] - YYYY-MM-DD'"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python release/check_tag.py TAG")
    sys.exit(problem_with(sys.argv[1]))
