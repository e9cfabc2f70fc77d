"""How long each test took when the whole suite last ran on a quiet machine, and what the runner does with it.

`tests/durations.json` says for every file how many seconds its cases took together, how long its longest set-up was,
how many processes its cases started, and which cases took more than `QUICK_S`. `pytest --record-durations` writes it
anew. Files start in the order of their seconds, the longest first, so that no worker is left alone with a long one at
the end; `pytest --quick`, which `make check` uses, leaves out what is slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = Path(__file__).parent / "durations.json"
QUICK_S = 0.08
"""A case that takes longer is no quick one."""
QUICK_SET_UP_S = 1.0
"""A file that prepares its cases for longer has no quick ones: what it prepares serves all of them."""
UNKNOWN_S = 1.0
"""What a file counts that was never recorded."""


@dataclass
class FileDurations:
    """What was recorded of a file."""

    seconds: float = 0.0
    set_up: float = 0.0
    processes: int = 0
    cases: int = 0
    slow: dict[str, float] = field(default_factory=dict)
    """Seconds of the cases that are not quick, by name."""

    @property
    def has_quick_cases(self) -> bool:
        return self.set_up <= QUICK_SET_UP_S and self.processes == 0 and len(self.slow) < max(self.cases, 1)


class RecordedDurations:
    """What was recorded of all files. Ids of cases are pytest's: `tests/unit/test_x.py::test_y[1]`."""

    def __init__(self, files: dict[str, FileDurations]) -> None:
        self._files = files

    @classmethod
    def load(cls, path: Path = FILE) -> RecordedDurations:
        """What the file says; nothing if it is missing."""
        if not path.exists():
            return cls({})
        return cls({name: FileDurations(**values) for name, values in json.loads(path.read_text()).items()})

    def save(self, path: Path = FILE) -> None:
        """One line a file, in the order of their names, so that differences can be read."""
        lines = (f"{json.dumps(name)}: {json.dumps(asdict(self._files[name]))}" for name in sorted(self._files))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def file_s(self, name: str) -> float:
        """Seconds that all cases of a file take together."""
        return self._files[name].seconds if name in self._files else UNKNOWN_S

    def case_s(self, case_id: str) -> float:
        """About how long a case takes."""
        name, _, case = case_id.partition("::")
        if name not in self._files:
            return QUICK_S
        of_file = self._files[name]
        rest = max(0.0, of_file.seconds - sum(of_file.slow.values()))
        return of_file.slow.get(case, rest / max(1, of_file.cases - len(of_file.slow)))

    def is_quick(self, case_id: str) -> bool:
        """Whether a case belongs to the quick ones. One that was never recorded does, unless it needs a model."""
        name, _, case = case_id.partition("::")
        if not self.may_be_quick(name):
            return False
        return name not in self._files or case not in self._files[name].slow

    def may_be_quick(self, name: str) -> bool:
        """Whether a file has quick cases."""
        if name.startswith(("tests/integration/", "tests/gpu/")):
            return False
        return name not in self._files or self._files[name].has_quick_cases


def recorded(reports: Iterable[tuple[str, str, float, int]]) -> RecordedDurations:
    """From the id of the case, the phase (`setup`, `call`, `teardown`), its seconds, and processes started in it."""
    files: dict[str, FileDurations] = {}
    cases: dict[str, float] = {}
    for case_id, phase, seconds, processes in reports:
        of_file = files.setdefault(case_id.partition("::")[0], FileDurations())
        of_file.seconds = round(of_file.seconds + seconds, 2)
        of_file.processes += processes
        if phase == "setup":
            of_file.cases += 1
            of_file.set_up = round(max(of_file.set_up, seconds), 2)
        cases[case_id] = cases.get(case_id, 0.0) + seconds
    for case_id, seconds in cases.items():
        name, _, case = case_id.partition("::")
        if seconds > QUICK_S:
            files[name].slow[case] = round(seconds, 2)
    return RecordedDurations(files)
