"""A whole server with service classes and a queue that is full: who is served, who is refused, who is dropped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.server.admission.service_classes import EXAMPLE
from tests.integration.server_process import ServerProcess, running_server

FACTORY = "headway.engine_process.engine_without_model:create_engine"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With the classes of the documentation, of which standard ones may wait alone."""
    file: Path = tmp_path_factory.mktemp("classes") / "classes.toml"
    file.write_text(EXAMPLE.replace("max_waiting = 200 ", "max_waiting = 1 "))
    with running_server(
        *("--service-classes", str(file), "--max-queue-requests", "3", "--scheduling-policy", "slo"),
        *("--refuse-late", "--no-access-log", "--engine-factory", FACTORY),
    ) as running:
        yield running


class Asked(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        super().__init__()
        self.answer: httpx.Response | None = None
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": "Hi", "max_tokens": 4} | fields
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(self._url, json=self._body, timeout=30)

    @property
    def outcome(self) -> tuple[int, str | None]:
        """Its status, and the code of its error."""
        self.join(timeout=30)
        assert self.answer is not None
        error = self.answer.json().get("error")
        return self.answer.status_code, None if error is None else error["code"]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_queue_that_is_full(server: ServerProcess) -> None:
    assert Asked(server, service_class="interactive", user="me", ttft_target_ms=1000).outcome == (200, None)

    def ask(num_waiting: int, **fields: Any) -> Asked:
        asked = Asked(server, **fields)
        until(lambda: server.gauges()["queue_requests"] == num_waiting)
        return asked

    os.kill(server.engine_pid, signal.SIGSTOP)  # so that all of them wait
    try:
        first = ask(1, service_class="batch")
        last = ask(2, service_class="batch")
        standard = ask(3)
        assert Asked(server).outcome == (429, "class_queue_full")
        assert Asked(server, service_class="batch").outcome == (429, "queue_full")
        interactive = ask(3, service_class="interactive")
        assert last.outcome == (503, "shed")
        assert last.answer is not None and last.answer.headers["retry-after"] == "1"
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    assert [asked.outcome for asked in (first, standard, interactive)] == [(200, None)] * 3
    server.wait_until_idle(timeout_s=5)
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counted = {
        line.rpartition(" ")[0].partition("service_class=")[2]: line for line in lines if "class_shed_tot" in line
    }
    assert counted['"batch"}'].endswith(" 1.0") and counted['"standard"}'].endswith(" 0.0")
