"""What recorded durations decide, and what a run prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded_durations import RecordedDurations, recorded

pytest_plugins = ["pytester"]

QUICK, SLOW, PREPARED, STARTS = (f"tests/unit/test_{name}.py" for name in ("quick", "slow", "prepared", "starts"))
REPORTS = [
    (f"{QUICK}::a", "setup", 0.01, 0),
    (f"{QUICK}::a", "call", 0.02, 0),
    (f"{QUICK}::b", "setup", 0.0, 0),
    (f"{QUICK}::b", "call", 4.0, 0),
    (f"{SLOW}::a", "setup", 0.0, 0),
    (f"{SLOW}::a", "call", 2.0, 0),
    (f"{PREPARED}::a", "setup", 3.0, 0),
    (f"{PREPARED}::a", "call", 0.01, 0),
    (f"{PREPARED}::b", "setup", 0.0, 0),
    (f"{PREPARED}::b", "call", 0.01, 0),
    (f"{STARTS}::a", "setup", 0.0, 0),
    (f"{STARTS}::a", "call", 0.01, 1),
]
QUICK_OR_NOT = [
    (f"{QUICK}::a", True),
    (f"{QUICK}::b", False),
    (f"{QUICK}::new", True),
    (f"{SLOW}::a", False),
    (f"{PREPARED}::b", False),
    (f"{STARTS}::a", False),
    ("tests/unit/test_new.py::a", True),
    ("tests/integration/test_new.py::a", False),
    ("tests/gpu/test_new.py::a", False),
]


@pytest.mark.parametrize("saved", [False, True])
def test_which_cases_are_quick_and_how_long_they_take(saved: bool, tmp_path: Path) -> None:
    durations = recorded(REPORTS)
    if saved:
        durations.save(tmp_path / "durations.json")
        durations = RecordedDurations.load(tmp_path / "durations.json")
    assert {case_id: durations.is_quick(case_id) for case_id, _ in QUICK_OR_NOT} == dict(QUICK_OR_NOT)
    assert durations.file_s(QUICK) == pytest.approx(4.03)
    assert durations.case_s(f"{QUICK}::b") == 4.0
    assert durations.case_s(f"{QUICK}::a") == pytest.approx(0.03)


def test_nothing_recorded_is_no_error(tmp_path: Path) -> None:
    durations = RecordedDurations.load(tmp_path / "none.json")
    assert durations.is_quick("tests/unit/test_x.py::a") and durations.file_s("tests/unit/test_x.py") == 1.0


def test_a_run_tells_what_failed_how_to_run_it_again_and_what_was_slow(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest(
        "from tests.recorded_durations import RecordedDurations\n"
        "from tests.run_report import RunReport\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(RunReport(config, RecordedDurations({})), 'RunReport')\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.parametrize('value', ['a b', '$x'])\n"
        "def test_wrong(value): assert not value\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_error(broken): pass\n"
        "def test_right(): pass\n"
        "def test_skipped(): pytest.skip('why')\n"
    )
    run = pytester.runpytest_subprocess("-n1", "-p", "no:cacheprovider", f"--rootdir={pytester.path}")
    run.assert_outcomes(passed=1, failed=2, errors=1, skipped=1)
    name = next(pytester.path.glob("test_*.py")).name
    run.stdout.fnmatch_lines(
        [
            f"FAILED {name}::test_wrong[[]a b]",
            "*= the 10 slowest cases =*",
            f"* s  {name}::test_*",
            "*= run the failed ones again =*",
            f"make test ARGS=\"'{name}::test_wrong[[]a b]'\"",
            f"make test ARGS=\"'{name}::test_wrong[[]\\$\\$x]'\"",
            f'make test ARGS="{name}::test_error"',
        ]
    )
