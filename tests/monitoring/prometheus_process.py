"""A real Prometheus in a process of its own, and what it says."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

SCRAPE_S = 1
LEAST_RANGE_S = 5
"""A range must hold a few scrapes."""
LEAST_FOR_S = 1
START_UP_S = 30.0
UNITS_S = {"s": 1, "m": 60, "h": 3600}
CONFIG = """\
global: {{scrape_interval: {scrape_s}s, evaluation_interval: {scrape_s}s}}
rule_files: {rule_files}
scrape_configs:
  - job_name: headway
    static_configs: [{{targets: ["{target}"]}}]
"""


def is_installed() -> bool:
    """Whether this machine has Prometheus (Debian, Ubuntu: `apt install prometheus`)."""
    return shutil.which("prometheus") is not None


def shortened(rules: str, factor: float) -> str:
    """Alert rules with all times divided by `factor`, so that a drill takes minutes where an incident takes hours."""

    def divided(match: re.Match[str], least_s: int) -> str:
        seconds = int(match[2]) * UNITS_S[match[3]] / factor
        return f"{match[1]}{max(least_s, math.ceil(seconds))}s"

    rules = re.sub(r"(\[)(\d+)([smh])(?=\])", lambda match: divided(match, LEAST_RANGE_S), rules)
    return re.sub(r"(for: )(\d+)([smh])", lambda match: divided(match, LEAST_FOR_S), rules)


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, which scrapes once a second."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now. Raises `ValueError` with Prometheus' message if it is wrong."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        if answer["status"] != "success":
            raise ValueError(f"{answer['error']}: {expression}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = httpx.get(f"{self.url}/api/v1/alerts", timeout=30).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def alert_names(self) -> set[str]:
        """Return the names of all alerts that it evaluates. Raises `ValueError` if one of its rules fails."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        for rule in rules:
            if rule["health"] == "err":
                raise ValueError(f"{rule['name']}: {rule['lastError']}")
        return {rule["name"] for rule in rules if rule["type"] == "alerting"}


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait until something is so. Raises `TimeoutError` that says what was awaited."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.2)


@contextlib.contextmanager
def running_prometheus(folder: Path, *, target: str, rules: str = "") -> Iterator[Prometheus]:
    """Start a Prometheus that keeps its data in `folder`, scrapes `target` and evaluates `rules`, and end it."""
    (folder / "alerts.yml").write_text(rules or "groups: []\n", encoding="utf-8")
    config = CONFIG.format(scrape_s=SCRAPE_S, rule_files="[alerts.yml]", target=target)
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    prometheus = Prometheus(f"http://127.0.0.1:{free_port()}")
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={prometheus.url.removeprefix('http://')}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(lambda: _is_ready(prometheus, process), "Prometheus is ready", START_UP_S)
            yield prometheus
        finally:
            process.terminate()


def _is_ready(prometheus: Prometheus, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"Prometheus ended with status {process.returncode}.")
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{prometheus.url}/-/ready").status_code == 200
    return False
