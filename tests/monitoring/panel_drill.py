"""Evaluates every expression of every panel in a real Prometheus that scrapes a real server under load.

The server has the embedded model, so that all numbers of a device and of speculation are there, and both prefixes.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import httpx

from tests.integration.server_process import running_server
from tests.monitoring.dashboards import FILES, Target, targets, vllm_targets
from tests.monitoring.load import asking
from tests.monitoring.prometheus_process import Prometheus, free_port, running_prometheus
from tests.monitoring.promql import filled

LOAD_S = 30.0
REPETITIVE = "one two three four one two three four one two three four one two three"
"""Speculation finds its guesses in such a text."""


def run(seconds: float = LOAD_S) -> int:
    """Returns the number of expressions without data. Prints them."""
    port = free_port()
    options = ("--port", str(port), "--no-access-log", "--metrics-prefix", "headway,vllm", "--speculation", "ngram")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_prometheus(Path(folder), target=f"127.0.0.1:{port}") as prometheus,
        running_server(*options) as server,
    ):
        body = {"prompt": REPETITIVE, "max_tokens": 48, "ignore_eos": True, "temperature": 0}
        with asking(server.url, 3, body):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": 1}, timeout=30)
            time.sleep(seconds)
            ours = [target for path in FILES for target in targets(path)]
            return _check(prometheus, ours) + _check(prometheus, vllm_targets())


def _check(prometheus: Prometheus, each: Iterable[Target]) -> int:
    num_good, failed = 0, 0
    for target in each:
        series = prometheus.query(filled(target.expression))
        values = [float(one["value"][1]) for one in series]
        if any(not math.isnan(value) for value in values):
            num_good += 1
        else:
            failed += 1
            print(f"NO DATA  {target.dashboard}, {target.panel}: {target.expression}")
    print(f"{num_good} of {num_good + failed} expressions have data")
    return failed
