"""What one client can do to the others: each attack runs beside another user's stream, which must not notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.integration.server_process import ServerProcess
from tests.integration.under_attack import attacked_server, unharmed

ATTACK_S = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with attacked_server() as running:
        yield running


def test_harm_is_noticed(server: ServerProcess) -> None:
    with pytest.raises(AssertionError, match="longest pause"):
        stand_still(server)


def stand_still(server: ServerProcess) -> None:
    with unharmed(server, longest_pause_s=0.5, health_p99_s=0.2):
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(server.process.pid, signal.SIGCONT)
