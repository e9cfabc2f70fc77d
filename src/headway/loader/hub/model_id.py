"""How a model of the Hugging Face hub is named: `owner/name`, or `owner/name:PART` for one of its GGUF files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.errors import ConfigError

DEFAULT_REVISION = "main"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([^/:\\]+))?")
_FILE_ENDINGS = (".gguf", ".json", ".safetensors")
_REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, at a revision."""

    repo: str
    part: str | None = None
    """A GGUF file: its name, or its quantisation, such as Q4_K_M."""
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""

    @classmethod
    def parse(cls, name: str, revision: str | None = None) -> HubModel | None:
        """The model that a name stands for; `None` if it cannot be a name of the hub. A path with other separators, or
        with a file's ending, is none. Raises `ConfigError` for a revision that cannot exist."""
        if revision is not None and (_REVISION.fullmatch(revision) is None or ".." in revision):
            raise ConfigError(f"revision '{revision}' is not the name of a branch, a tag or a commit.")
        match = _NAME.fullmatch(name)
        if match is None or match[1].endswith(_FILE_ENDINGS) or ".." in match[1] or "--" in match[1]:
            return None
        return cls(match[1], match[2], revision or DEFAULT_REVISION)

    def __str__(self) -> str:
        part = "" if self.part is None else f":{self.part}"
        at = "" if self.revision == DEFAULT_REVISION else f" at revision {self.revision}"
        return f"{self.repo}{part}{at}"

    @property
    def command(self) -> str:
        """The command that fetches it."""
        part = "" if self.part is None else f":{self.part}"
        at = "" if self.revision == DEFAULT_REVISION else f" --revision {self.revision}"
        return f"headway pull {self.repo}{part}{at}"
