"""A server under attack, and what others feel of it: the harness of the attack tests.

    with attacked_server() as server:
        with unharmed(server):
            ...                      # the attack: a few seconds, cheap for this side

A process of its own, which the attacker cannot slow down, asks /health all the time, follows another user's stream and
looks at the memory of the server's processes. Afterwards `unharmed` asserts that /health answered in time, that the
stream never paused for long, that the event loop never stood still, that memory stayed bounded, and that the server
serves.

Time in which the system ran something else (the attacker's own processes, too) is taken off: the server's and the
observer's wait for a processor, as Linux counts it. A slow machine, or one that is shared with others, is allowed more
time by as much as it takes longer for a known piece of work; $HEADWAY_ATTACK_SLACK says how much more instead. Modules
that use this may try again: harm is there each time, a slow moment is not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import msgspec

from tests.integration import attack_observer
from tests.integration.attack_observer import MIN_PROBES, REPOSITORY, Felt, beside
from tests.integration.server_process import ServerProcess, running_server

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine

FACTORY = f"{__name__}:create_engine"
STEP_S = 0.01
USUAL_WORK_S = 0.02
HEALTH_P99_S = 0.1
LONGEST_PAUSE_S = 1.0
MAX_GROWTH_BYTES = 128 * 2**20
"""Of each process's memory, over what it took when the attack began."""


def create_engine(options: dict[str, Any]) -> LLMEngine:
    """An engine without a model whose steps take a while, so that streams go on without taking a core."""
    from headway.engine_process import engine_without_model  # torch; the observer needs none of it

    return engine_without_model.create_engine({"step_s": STEP_S, **options})


@contextlib.contextmanager
def attacked_server(
    *arguments: str, with_model: bool = False, max_open_files: int | None = None
) -> Iterator[ServerProcess]:
    """A server with options; without the model where it does not matter, which is cheaper."""
    engine = () if with_model else ("--engine-factory", FACTORY)
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running_server(
        *("--no-access-log", *engine, *arguments),
        environment={"PYTHONPATH": path},
        max_open_files=max_open_files,
    ) as server:
        yield server


@contextlib.contextmanager
def unharmed(
    server: ServerProcess,
    *,
    key: str | None = None,
    max_growth_bytes: int = MAX_GROWTH_BYTES,
    health_p99_s: float = HEALTH_P99_S,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> Iterator[Felt]:
    """Assert that what happens inside harms nobody else. What was felt is filled in at the end; `key` is an API key."""
    felt = Felt()
    stalls_before = server.gauges(_authorization(key))["event_loop_stalls_total"]
    task = {
        "url": server.url,
        "headers": _authorization(key),
        "pids": {"front end": server.front_end_pid, "engine": server.engine_pid},
    }
    with beside(attack_observer.__name__, task) as observer:
        assert observer.stdout is not None
        assert observer.stdout.readline() == "ready\n", "the observer did not start"
        yield felt
        found = msgspec.json.decode(observer.communicate(timeout=30)[0], type=Felt)
    for name in felt.__struct_fields__:
        setattr(felt, name, getattr(found, name))
    print(f"\n{felt}")
    assert len(felt.health_s) >= MIN_PROBES and not felt.health_failures, felt.health_failures
    assert not felt.stream_failures, felt.stream_failures
    slack = float(os.environ.get("HEADWAY_ATTACK_SLACK") or max(1.0, work_s() / USUAL_WORK_S))
    assert felt.health_p99_s <= health_p99_s * slack, str(felt)
    assert felt.longest_pause_s <= longest_pause_s * slack, str(felt)
    assert max(felt.growth_bytes.values()) <= max_growth_bytes, str(felt)
    assert_serves(server, key=key)
    gauges = server.gauges(_authorization(key))
    assert gauges["front_end_restarts_total"] == 0
    assert gauges["event_loop_stalls_total"] == stalls_before, "\n".join(server.log[-40:])


def assert_serves(server: ServerProcess, *, key: str | None = None) -> None:
    """The server completes a request, and then has nothing left to do."""
    headers = _authorization(key)
    body = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
    server.wait_until_idle(headers, timeout_s=15)


def connected(server: ServerProcess, *, timeout_s: float = 5.0) -> socket.socket:
    """A bare connection to the server."""
    parts = urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)


def flood(connection: socket.socket, piece: bytes, *, seconds: float, max_bytes: int = 2**30) -> tuple[int, bool]:
    """Send a piece over and over, until the server closes the connection, the time is up or enough was sent.

    Returns how many bytes the server's side took, and whether it closed the connection.
    """
    until_s = time.monotonic() + seconds
    num_sent = 0
    connection.settimeout(0.1)
    while time.monotonic() < until_s and num_sent < max_bytes:
        try:
            num_sent += connection.send(piece)
        except TimeoutError:
            continue
        except OSError:
            return num_sent, True
    return num_sent, False


def is_closed(connection: socket.socket, *, within_s: float) -> bool:
    """Read what comes until the other side closes; whether it did in time."""
    until_s = time.monotonic() + within_s
    while (left_s := until_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            if not connection.recv(65536):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def work_s() -> float:
    """How long a known piece of work takes at the moment."""
    times_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        sum(number * number for number in range(130_000))
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
