"""What a run of the whole suite prints: a progress line, each failure as it happens, and at the end the slowest cases
and how to run the failed ones again."""

from __future__ import annotations

import re
import shlex
import time

import pytest

from tests.recorded_durations import RecordedDurations, recorded

EVERY_S = 30.0
"""Between two progress lines where the output is no terminal, so that a log stays short."""
NUM_SLOWEST = 10


class RunReport:
    """A plugin of the process that hands tests out to workers."""

    def __init__(self, config: pytest.Config, durations: RecordedDurations) -> None:
        self._config = config
        self._durations = durations
        self._begun_s = time.monotonic()
        self._told_s = self._begun_s
        self._left_s: dict[str, float] = {}
        self._all_s = 0.0
        self._num_done = 0
        self._reports: list[tuple[str, str, float, int]] = []
        self._failed: list[str] = []

    @property
    def _terminal(self) -> pytest.TerminalReporter:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """All workers collect the same cases."""
        if not self._left_s:
            self._left_s = {case_id: self._durations.case_s(case_id) for case_id in ids}
            self._all_s = sum(self._left_s.values())
            self._begun_s = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: the progress line says more."""
        if report.when == "call" or report.skipped:
            return (report.outcome, "", report.outcome.upper())
        return ("error", "", "ERROR") if report.failed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        processes = sum(number for name, number in report.user_properties if name == "processes")
        self._reports.append((report.nodeid, report.when or "", report.duration, int(processes)))
        if report.failed:
            self._failed.append(report.nodeid)
            self._write(f"FAILED {report.nodeid}", is_lasting=True)
        if report.when == "teardown":
            self._num_done += 1
            self._left_s.pop(report.nodeid, None)
            self._tell()

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < (0.5 if self._terminal.isatty else EVERY_S):
            return
        self._told_s = now_s
        took_s, left_s = now_s - self._begun_s, sum(self._left_s.values())
        num_cases = self._num_done + len(self._left_s)
        line = f"{self._num_done:,} of {num_cases:,} cases, {len(self._failed)} failed, {_minutes(took_s)}"
        if 0.0 < left_s < self._all_s:
            line += f", about {_minutes(took_s * left_s / (self._all_s - left_s))} left"
        self._write(line, is_lasting=not self._terminal.isatty)

    def _write(self, line: str, *, is_lasting: bool) -> None:
        if self._terminal.isatty:
            self._terminal.write(f"\r\033[K{line}" + ("\n" if is_lasting else ""), flush=True)
        else:
            self._terminal.write_line(line)

    def pytest_terminal_summary(self) -> None:
        seconds: dict[str, float] = {}
        for case_id, _, took_s, _ in self._reports:
            seconds[case_id] = seconds.get(case_id, 0.0) + took_s
        self._terminal.section(f"the {NUM_SLOWEST} slowest cases")
        for case_id, took_s in sorted(seconds.items(), key=lambda item: -item[1])[:NUM_SLOWEST]:
            self._terminal.write_line(f"{took_s:7.1f} s  {case_id}")
        if self._failed:
            self._terminal.section("run the failed ones again")
            for case_id in dict.fromkeys(self._failed):
                quoted = shlex.quote(case_id).replace("$", "$$")  # for pytest's shell, for make, and for this shell
                quoted = re.sub(r'[\\`"$]', r"\\\g<0>", quoted)
                self._terminal.write_line(f'make test ARGS="{quoted}"')

    def save(self) -> None:
        """Write `tests/durations.json`."""
        recorded(self._reports).save()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
