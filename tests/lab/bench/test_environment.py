"""The age of the process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway_lab.bench import environment


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_time_is_counted_from_the_start_of_the_process() -> None:
    code = "import time; time.sleep(0.3); from headway_lab.bench.environment import *; print(seconds_since_start())"
    started_s = time.perf_counter()
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0.3 <= float(printed) <= time.perf_counter() - started_s + 0.02  # the kernel counts in ticks of 10 ms


def test_without_proc_the_import_is_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert 0 < environment.seconds_since_start() <= time.perf_counter()
