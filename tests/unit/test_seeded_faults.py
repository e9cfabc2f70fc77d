"""Every fault of `python -m tests.seeded_faults` can still be seeded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.seeded_faults.__main__ import main
from tests.seeded_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_seeded(fault: Fault) -> None:
    source = (ROOT / "src" / "headway" / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
    assert all((ROOT / "tests" / name).exists() for name in fault.tests.split())


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_list_names_all_or_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0 and capsys.readouterr().out.count("\n") == len(FAULTS)
    assert main(["--list", "--only", FAULTS[0].name]) == 0 and FAULTS[0].seen in capsys.readouterr().out
