"""NVML is asked beside the steps, until it fails or the engine ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from headway.core.utilisation import Utilisation, UtilisationStats
from headway.worker.nvml import NvmlPolling

POLL_S = 0.001


class Library:
    """Says 75%, a given number of times."""

    def __init__(self, num_answers: int) -> None:
        self._num_left = num_answers
        self.has_failed = threading.Event()

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        assert handle == "GPU-1"
        if not self._num_left:
            self.has_failed.set()
            raise RuntimeError("GPU is lost")
        self._num_left -= 1
        return SimpleNamespace(gpu=75, memory=10)


def test_it_counts_the_time_in_which_a_kernel_ran() -> None:
    library, stats = Library(4), UtilisationStats()
    polling = NvmlPolling(library, "GPU-1", stats, poll_s=POLL_S)
    assert library.has_failed.wait(10.0)
    polling.stop()
    assert stats.nvml_s == pytest.approx(4 * POLL_S)
    assert Utilisation.of(stats).as_json() == {"nvml": 0.75}


def test_a_cpu_is_not_asked_for() -> None:
    assert NvmlPolling.of_device("cpu", UtilisationStats()) is None
