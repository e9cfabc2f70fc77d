"""The edits that a page of docs shows as diffs, made in a copy of the repository."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
Edit = tuple[str, str, str]
"""(file, old text, new text)"""


def copied(root: Path, *folders: str) -> None:
    """Copy folders of the repository."""
    for name in folders:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))


def documented_edits(page: str) -> list[list[Edit]]:
    """The edits of each diff on a page of docs. A diff has a line `--- FILE` before the lines of each place."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```diff\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [[_edit(part) for part in re.split(r"^--- ", block, flags=re.MULTILINE)[1:]] for block in blocks]


def _edit(part: str) -> Edit:
    path, *lines = part.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    return path, old, new


def make_edits(edits: list[Edit], root: Path) -> set[str]:
    """Make them in a copy of the repository, and return the files. "…" stands for whatever is there."""
    for path, old, new in edits:
        file = root / path
        text = file.read_text(encoding="utf-8")
        found = re.findall(re.escape(old).replace("…", "(.*?)"), text, flags=re.DOTALL)
        assert len(found) == 1, f"{path} has changed, and the page has not: {old}"
        if "…" in old:
            old, new = (one.replace("…", found[0].rstrip(", \n")) for one in (old.replace("…", found[0]), new))
        file.write_text(text.replace(old, new), encoding="utf-8")
    return {path for path, _, _ in edits}
