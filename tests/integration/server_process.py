"""A real `headway serve` in a process of its own, for tests that talk to it over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests import warm_start

START_UP_S = 120.0
BUSY = ("num_requests_running", "num_requests_waiting", "kv_blocks_live", "queue_requests", "queue_tokens")
"""Metrics that are zero when there is nothing to do."""


@dataclass
class ServerProcess:
    """A server that is ready: its parent process, which signals go to, a front end, and engines."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)
    """What it wrote to stderr; the access log goes to `access_log`."""
    access_log: list[str] = field(default_factory=list)

    @property
    def front_end_pid(self) -> int:
        """The process that answers, the only child of the parent."""
        return children(self.process.pid)[0]

    @property
    def engine_pids(self) -> list[int]:
        """The processes of the engines, in the order of their start; a front end has other children, too."""
        return [
            pid
            for pid in children(self.front_end_pid)
            if b"headway.engine_process.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    @property
    def engine_pid(self) -> int:
        """The only engine's process."""
        return self.engine_pids[0]

    def gauges(self, headers: Mapping[str, str] | None = None) -> dict[str, float]:
        """What /metrics says, by name without the prefix; of several values of one name, the last."""
        answer = httpx.get(f"{self.url}/metrics", headers=headers)
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith("headway:") and "_bucket" not in line]
        return {line.partition("{")[0].removeprefix("headway:"): float(line.split()[-1]) for line in lines}

    def counters(self) -> dict[str, float]:
        """All numbers of /metrics that must never fall, by name and labels: of counters, histograms, summaries."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        growing = [family for family in families if family.type in ("counter", "histogram", "summary")]
        return {f"{one.name}{sorted(one.labels.items())}": one.value for family in growing for one in family.samples}

    def wait_until_idle(self, headers: Mapping[str, str] | None = None, *, timeout_s: float) -> dict[str, float]:
        """Until nobody runs or waits, no block is held, and the server is well. Returns the metrics then."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            health = httpx.get(f"{self.url}/health").json()
            gauges = self.gauges(headers)  # after it: an engine that is away is idle too
            busy = {name: gauges[name] for name in BUSY if gauges[name]}
            if not busy and health["status"] == "ok":
                return gauges
            assert time.monotonic() < deadline_s, (health, busy)
            time.sleep(0.05)

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def children(pid: int) -> list[int]:
    """What this process's main thread has started, without the nursery that makes its children in tests."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if not warm_start.is_nursery(int(child))]


@contextlib.contextmanager
def running_server(
    *arguments: str, environment: dict[str, str] | None = None, max_open_files: int | None = None
) -> Iterator[ServerProcess]:
    """Start a server on a free port, wait until it serves, and end it afterwards whatever happened. No load balancer is
    in front of it, so it has no lame duck unless a test wants one."""
    command = [sys.executable, "-m", "headway", "serve", "--port", "0", "--lame-duck-s", "0", *arguments]
    if max_open_files is not None:
        limit = f"ulimit -Sn {max_open_files // 2}; ulimit -Hn {max_open_files}"
        command = ["bash", "-c", f'{limit}; exec "$@"', "bash", *command]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    server = ServerProcess(process)
    threads = [
        threading.Thread(target=_collect, args=(pipe, lines), daemon=True)
        for pipe, lines in ((process.stderr, server.log), (process.stdout, server.access_log))
    ]
    for thread in threads:
        thread.start()
    try:
        server.url = _wait_for_url(server)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in threads:
            thread.join(timeout=5)


def _collect(pipe: Iterator[str], lines: list[str]) -> None:
    for line in pipe:
        lines.append(line.rstrip("\n"))


def _wait_for_url(server: ServerProcess) -> str:
    deadline = time.monotonic() + START_UP_S
    while time.monotonic() < deadline and server.process.poll() is None:
        for line in server.log:
            if match := re.match(r"Serving on (\S+) ", line):
                return match[1]
        time.sleep(0.05)
    raise AssertionError("the server did not start:\n" + "\n".join(server.log))
