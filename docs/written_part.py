"""The part of a page that a program writes: all that stands between two comments."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WrittenPart:
    """The part of a page between the lines `begin` and `end`."""

    page: Path
    begin: str
    end: str

    def rewritten(self, content: str) -> str:
        """The page with this content between the two lines."""
        before, found_begin, rest = self._read().partition(self.begin)
        _, found_end, after = rest.partition(self.end)
        if not found_begin or not found_end:
            raise ValueError(f"{self.page.name} lacks '{self.begin}' or '{self.end}'")
        return f"{before}{self.begin}\n\n{content}\n\n{self.end}{after}"

    def is_current(self, content: str) -> bool:
        """Whether the page has this content already."""
        return self.rewritten(content) == self._read()

    def main(self, content: str) -> int:
        """Write the content into the page; with `--check`, exit with 1 if it is not there yet."""
        if "--check" not in sys.argv[1:]:
            self.page.write_text(self.rewritten(content), encoding="utf-8")
        elif not self.is_current(content):
            print(f"docs/{self.page.name} is stale: run 'make docs'", file=sys.stderr)
            return 1
        return 0

    def _read(self) -> str:
        return self.page.read_text(encoding="utf-8")
