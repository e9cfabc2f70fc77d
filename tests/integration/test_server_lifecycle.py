"""A server process through good and bad days: idle, left alone, stalled, bereft of its engine, and told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server_process import ServerProcess, children, running_server

FACTORY = "headway.engine_process.engine_without_model:create_engine"
ENDLESS = {"prompt": "Hi", "max_tokens": 8000, "stream": True}
NUM_STREAMS = 32
IDLE_S = 1.5
IDLE_SHARE = 0.1
"""Of one core; a look at a longer time finds well under 0.02, but a busy machine counts in ticks of 10 ms."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    timeouts = ("--engine-hang-timeout-s", "6", "--front-end-hang-timeout-s", "2", "--drain-timeout-s", "1")
    names = ("--metrics-prefix", "headway,vllm")  # of both, no counter may fall
    with running_server(*timeouts, *names, "--no-access-log", "--engine-factory", FACTORY) as running:
        yield running


@contextlib.contextmanager
def streaming(server: ServerProcess, **fields: Any) -> Iterator[Iterator[str]]:
    """The events of an answer that has begun, and would go on for long."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS | fields, timeout=60) as answer:
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(events)
        yield events


def completed(server: ServerProcess) -> int:
    """How many tokens a short request gets."""
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 4}, timeout=30)
    return answer.json()["usage"]["completion_tokens"]


def wait_for_health(server: ServerProcess, status: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + 30
    while (answer := httpx.get(f"{server.url}/health")).status_code != status:
        assert time.monotonic() < deadline_s, answer.text
        time.sleep(0.05)
    found: dict[str, Any] = answer.json()
    return found


def test_the_start_tells_how_long_its_parts_took(server: ServerProcess) -> None:
    line = next(line for line in server.log if line.startswith("Ready in"))
    whole_s, *parts_s = map(float, re.findall(r"(\d+\.\d) s", line))
    assert re.sub(r"\d+\.\d", "0.0", line) == "Ready in 0.0 s (imports 0.0 s, tokenizer 0.0 s, engine 0.0 s)."
    assert sum(parts_s) == pytest.approx(whole_s, abs=0.3)


def test_an_idle_server_sleeps(server: ServerProcess) -> None:
    """Once it has prepared what the first grammar needs, which it does when there is nothing else to do."""
    pids = (server.process.pid, server.front_end_pid, server.engine_pid)
    used_s = [IDLE_S]
    for _ in range(12):
        before_s = [cpu_s(pid) for pid in pids]
        time.sleep(IDLE_S)
        used_s = [cpu_s(pid) - before for pid, before in zip(pids, before_s, strict=True)]
        if max(used_s) < IDLE_SHARE * IDLE_S:
            return
    raise AssertionError(f"CPU seconds in {IDLE_S:g} s: {used_s}")


def test_health_tells_of_an_idle_engine_that_is_stopped(server: ServerProcess) -> None:
    pid = server.engine_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert "no sign of life" in wait_for_health(server, 503)["reason"]
        assert httpx.get(f"{server.url}/metrics").status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_health(server, 200)
    assert server.engine_pid == pid, "it came back in time, and is not replaced"


def test_a_stopped_engine_under_load_is_replaced_and_no_counter_falls(server: ServerProcess) -> None:
    pid = server.engine_pid
    completed(server)
    scrapes = [server.counters()]
    with streaming(server, max_tokens=3000) as events:
        os.kill(pid, signal.SIGSTOP)
        wait_for_health(server, 503)
        scrapes.append(server.counters())
        *_, last, done = events
    assert '"finish_reason":"length"' in last and done == "[DONE]", "it goes on in the next one"
    server.wait_until_idle(timeout_s=60)
    scrapes.append(server.counters())
    assert server.engine_pid != pid
    assert completed(server) == 4
    scrapes.append(server.counters())
    for before, after in pairwise(scrapes):
        assert not {name: (value, after[name]) for name, value in before.items() if after[name] < value}


def test_a_client_that_leaves_frees_its_blocks_at_once(server: ServerProcess) -> None:
    for _ in range(5):
        with streaming(server):
            assert server.gauges()["kv_blocks_live"] > 0
        server.wait_until_idle(timeout_s=1)


def test_a_killed_engine_leaves_nothing_in_the_metrics(server: ServerProcess) -> None:
    before = server.gauges()
    completed(server)
    server.wait_until_idle(timeout_s=60)
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_for_health(server, 503)
    wait_for_health(server, 200)
    after = server.wait_until_idle(timeout_s=60)  # without a new request
    assert after["engine_restarts_total"] == before["engine_restarts_total"] + 1
    assert after["kv_blocks_cached"] == 0, "what was cached went with it"
    assert after["kv_blocks_free"] == before["kv_blocks_free"] + before["kv_blocks_cached"]
    assert after["generation_tokens_total"] > before["generation_tokens_total"]


def test_a_front_end_that_is_stopped_is_replaced_and_what_comes_meanwhile_is_served(server: ServerProcess) -> None:
    """Its engine goes with it: the next one may need its memory."""
    before = (server.front_end_pid, server.engine_pid)
    os.kill(server.front_end_pid, signal.SIGSTOP)
    assert httpx.get(f"{server.url}/health", timeout=60).json() == {"status": "ok", "reason": ""}
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert any("stood still for 2 s; its stacks:" in line for line in server.log)
    assert server.gauges()["front_end_restarts_total"] == 1


def test_what_is_not_done_when_the_drain_ends_is_told_so(server: ServerProcess) -> None:
    """The last test: it ends the server, while streams run that would go on for long."""
    ends: list[str] = []
    started = threading.Barrier(NUM_STREAMS + 1)

    def follow() -> None:
        with streaming(server) as events:
            started.wait(timeout=30)
            *_, last, done = events
            assert done == "[DONE]"
            ends.append(json.loads(last).get("error", {}).get("code", "finished"))

    threads = [threading.Thread(target=follow) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    started.wait(timeout=30)
    server.process.terminate()
    signalled_s = time.monotonic()
    assert server.process.wait(timeout=20) == 0
    assert time.monotonic() - signalled_s < 15
    for thread in threads:
        thread.join(timeout=10)
    assert ends == ["server_shutting_down"] * NUM_STREAMS
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.parametrize("num_signals", [1, 2])
def test_sigterm_does_not_wait_for_an_engine_that_is_stopped(num_signals: int) -> None:
    """With the default options, while a client waits; a second signal waits for nothing."""
    with running_server("--no-request-log", environment={"HEADWAY_ENGINE_FACTORY": FACTORY}) as server:
        pid = server.engine_pid
        with streaming(server):
            os.kill(pid, signal.SIGSTOP)
            signalled_s = time.monotonic()
            server.process.terminate()
            if num_signals == 2:
                assert wait_for_health(server, 503)["status"] == "draining"
                server.process.terminate()
            assert server.process.wait(timeout=60) == 0
            took_s = time.monotonic() - signalled_s
        assert took_s < (10.0 if num_signals == 1 else 5.0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_sigterm_while_the_engine_is_loading_ends_all_of_it() -> None:
    command = [sys.executable, "-m", "headway", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not any(b"engine_process" in command_of(pid) for pid in descendants(process.pid)):
            time.sleep(0.01)
        pids = descendants(process.pid)
        process.terminate()
        told = process.stderr.read()
        assert process.wait(timeout=20) == 0
    assert "Stopped before it was ready." in told and "Traceback" not in told
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        own = children(pid)
        return own + [each for child in own for each in descendants(child)]
    return []


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def cpu_s(pid: int) -> float:
    """Processor time that a process has used so far, its own and the system's for it."""
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
