"""Causes what each alert is about, in a real server, and sees a real Prometheus raise it.

Times in the rules are divided by `FACTOR`. Each scenario has a server of its own, on the port that Prometheus scrapes.
`HeadwayDiskCacheFails` needs a disk that fails; `deploy/prometheus/alerts_test.yml` tests it, and all true times.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.integration.server_process import ServerProcess, running_server
from tests.monitoring.load import asking
from tests.monitoring.prometheus_process import Prometheus, free_port, running_prometheus, shortened, wait_for
from tests.monitoring.slow_engine import FACTORY, STEP_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
SITE = Path(__file__).with_name("site")
FACTOR = 15
PATIENCE_S = 240.0
NOT_DRILLED = frozenset({"HeadwayDiskCacheFails"})

LONG_PROMPT = {"prompt": [300] * 352, "max_tokens": 30, "ignore_eos": True}
"""22 blocks of 16 tokens, which requests share, and two of its own: 24 blocks cannot hold two of them to the end."""
LONG_ANSWER = {"prompt": "Hi", "max_tokens": 600, "ignore_eos": True}
SHORT_PROMPT = {"prompt": "Hi", "max_tokens": 40, "ignore_eos": True}


@dataclass(frozen=True)
class Scenario:
    """A server, what is done to it, and the alerts that this must raise."""

    alerts: tuple[str, ...]
    cause: Callable[[ServerProcess], contextlib.AbstractContextManager[None]]
    options: tuple[str, ...] = ()
    step_s: float = 0.02


def _overload(server: ServerProcess) -> contextlib.AbstractContextManager[None]:
    return asking(server.url, 12, LONG_PROMPT)


@contextlib.contextmanager
def _repeating(act: Callable[[], None], every_s: float) -> Iterator[None]:
    """Do something again and again inside the block."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
                act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _dying_engine(server: ServerProcess) -> Iterator[None]:
    """Kill the engine whenever it has come back, while clients ask."""

    def kill() -> None:
        if httpx.get(f"{server.url}/health").status_code == 200:
            os.kill(server.engine_pid, signal.SIGKILL)

    with asking(server.url, 6, LONG_ANSWER), _repeating(kill, 1.0):
        yield


@contextlib.contextmanager
def _stopped_engine(server: ServerProcess) -> Iterator[None]:
    """Stop the engine in the middle of answers."""
    pid = server.engine_pid
    with asking(server.url, 4, SHORT_PROMPT):
        wait_for(lambda: server.gauges()["num_requests_running"] > 0, "requests run", 30)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _pausing_engine(server: ServerProcess) -> Iterator[None]:
    """Stop the engine for moments, each time when requests wait whose first tokens were forecast."""
    pid = server.engine_pid

    def pause() -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pid, signal.SIGCONT)

    with asking(server.url, 4, SHORT_PROMPT), _repeating(pause, 0.7):
        yield


def _stalled_front_end(server: ServerProcess) -> contextlib.AbstractContextManager[None]:
    return _repeating(lambda: os.kill(server.front_end_pid, signal.SIGRTMIN), 10.0)


@contextlib.contextmanager
def _killed_front_end(server: ServerProcess) -> Iterator[None]:
    os.kill(server.front_end_pid, signal.SIGKILL)
    yield


@contextlib.contextmanager
def _ended_server(server: ServerProcess) -> Iterator[None]:
    server.terminate()
    yield


SCENARIOS: dict[str, Scenario] = {
    "overload": Scenario(
        (
            *("HeadwayQueueLong", "HeadwayRequestsRefused", "HeadwayKvCacheFull", "HeadwayPreemptions"),
            *("HeadwayFirstTokensLate", "HeadwayFirstTokensLateForHours"),
            *("HeadwayTokensLate", "HeadwayTokensLateForHours"),
        ),
        _overload,
        ("--max-num-seqs", "2", "--num-kv-blocks", "24", "--max-queue-requests", "6"),
        step_s=0.15,
    ),
    "dying engine": Scenario(
        ("HeadwayEngineRestarted", "HeadwayEngineRestartsOften", "HeadwayServerErrors", "HeadwayRequestsFail"),
        _dying_engine,
        ("--no-resume",),
    ),
    "stopped engine": Scenario(
        ("HeadwayNoTokens", "HeadwayReplicaDown"),
        _stopped_engine,
        ("--engine-hang-timeout-s", "0", "--step-timeout-s", "0"),
        step_s=0.1,
    ),
    "pausing engine": Scenario(("HeadwayForecastsOff",), _pausing_engine, ("--max-num-seqs", "1")),
    "stalled front end": Scenario(("HeadwayEventLoopStalls",), _stalled_front_end),
    "killed front end": Scenario(("HeadwayFrontEndRestarted",), _killed_front_end),
    "ended server": Scenario(("HeadwayDown",), _ended_server),
}


def play(scenario: Scenario, prometheus: Prometheus, port: int) -> None:
    """Start the server, cause the trouble, and wait until all its alerts fire. Prints when each does."""
    path = os.pathsep.join([str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {STEP_VARIABLE: str(scenario.step_s), "PYTHONPATH": path, "HEADWAY_TESTS_COLD": "1"}
    options = ("--port", str(port), "--no-access-log", "--engine-factory", FACTORY, *scenario.options)
    awaited = set(scenario.alerts)
    with running_server(*options, environment=environment) as server:
        wait_for(lambda: not awaited & prometheus.firing(), "the alerts are quiet at first", PATIENCE_S)
        wait_for(lambda: bool(prometheus.query("up == 1")), "Prometheus sees the server", 30)
        time.sleep(2)  # two scrapes: `increase` needs a value from before
        began_s = time.monotonic()
        with scenario.cause(server):
            while awaited:
                for name in sorted(awaited & prometheus.firing()):
                    awaited.remove(name)
                    print(f"  {name} fires after {time.monotonic() - began_s:.0f} s", flush=True)
                if time.monotonic() - began_s > PATIENCE_S:
                    raise TimeoutError(f"not raised within {PATIENCE_S:g} s: {', '.join(sorted(awaited))}")
                time.sleep(0.5)


def run(names: list[str], factor: float = FACTOR) -> int:
    """Play scenarios, all of them if none is named. Returns the number of those that failed."""
    port, failed = free_port(), 0
    rules = shortened(RULES.read_text(encoding="utf-8"), factor)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_prometheus(Path(folder), target=f"127.0.0.1:{port}", rules=rules) as prometheus,
    ):
        wait_for(lambda: bool(prometheus.alert_names()), "Prometheus has read the rules", 30)
        covered = {alert for scenario in SCENARIOS.values() for alert in scenario.alerts}
        if missing := prometheus.alert_names() - covered - NOT_DRILLED:
            print(f"No scenario causes {', '.join(sorted(missing))}.")
            failed += 1
        for name in names or SCENARIOS:
            print(f"{name}:", flush=True)
            try:
                play(SCENARIOS[name], prometheus, port)
            except (TimeoutError, AssertionError) as error:
                print(f"  FAILED: {error}")
                failed += 1
        prometheus.alert_names()  # raises if a rule could not be evaluated
    return failed
