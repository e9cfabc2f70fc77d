"""/v1/kv_events of real server processes: an index built from it, by the documented rule, is what the caches hold."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.integration.server_process import ServerProcess, running_server

FACTORY = ("--engine-factory", "headway.rpc.engine_without_model:create_engine", "--no-access-log")
KEYS = ("--api-key", "alice", "--api-key", "bob")
HEADERS = {"authorization": "Bearer alice"}
PATIENCE_S = 60.0


class Follower:
    """A client in a thread, which keeps an index and complains of gaps."""

    def __init__(self, server: ServerProcess) -> None:
        self.held: dict[int, set[str]] = {}
        self.at: dict[int, tuple[int, int]] = {}
        self.hello: dict[str, Any] = {}
        self.problem: BaseException | None = None
        self.is_over = False
        self._url = f"{server.url}/v1/kv_events"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            with httpx.stream("GET", self._url, headers=HEADERS, timeout=PATIENCE_S) as answer:
                assert answer.status_code == 200
                name = ""
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        data = json.loads(line.removeprefix("data: "))
                        self._take(data) if name == "blocks" else self.hello.update(data)
            self.is_over = True
        except BaseException as error:
            self.problem = error

    def _take(self, event: dict[str, Any]) -> None:
        place, now = event["replica"], (event["epoch"], event["number"])
        held = set() if event["is_whole"] else self.held[place].copy()
        if not event["is_whole"] and now != self.at[place]:
            assert now == (self.at[place][0], self.at[place][1] + 1)
        assert set(event["evicted"]) <= held and not held & set(event["stored"])
        self.held[place] = (held - set(event["evicted"])) | set(event["stored"])
        self.at[place] = now

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.problem is None, self.problem
            assert time.monotonic() < deadline_s, (self.at, {place: len(held) for place, held in self.held.items()})
            time.sleep(0.02)


def documented_digests(tokens: list[int], *, key: str, salt: str, block_size: int) -> list[str]:
    """As docs/many_machines.md says it, and with nothing of Headway."""
    whole_salt = f"{hashlib.sha256(key.encode()).hexdigest()}:{salt}"
    digest = hashlib.blake2b(whole_salt.encode(), digest_size=32, person=b"headway-root").digest()
    digests = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        packed = struct.pack(f"<{block_size}i", *tokens[start : start + block_size])
        digest = hashlib.blake2b(digest + packed, digest_size=32).digest()
        digests.append(digest.hex())
    return digests


def complete(server: ServerProcess, tokens: list[int], **fields: Any) -> None:
    body = {"prompt": tokens, "max_tokens": 4, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def prompt(number: int, length: int = 80) -> list[int]:
    return [(number * 37 + place) % 900 + 10 for place in range(length)]


def test_an_index_built_outside_equals_the_caches() -> None:
    options = ("--kv-events", "--replicas", "2", "--router", "round-robin", "--num-kv-blocks", "64")
    with running_server(*FACTORY, *KEYS, *options) as server:
        assert httpx.get(f"{server.url}/v1/kv_events").status_code == 401
        follower = Follower(server)
        follower.wait(lambda: len(follower.held) == 2)
        assert follower.hello["num_replicas"] == 2
        block_size = follower.hello["block_size"]

        def complete_and_follow(number: int, **fields: Any) -> None:
            complete(server, prompt(number), **fields)
            salt = fields.get("cache_salt", "")
            known = set(documented_digests(prompt(number), key="alice", salt=salt, block_size=block_size))
            follower.wait(lambda: any(known <= held for held in follower.held.values()))

        complete_and_follow(0, cache_salt="mine")
        for number in range(1, 30):
            complete(server, prompt(number))
        complete_and_follow(30)
        assert server.gauges(HEADERS)["prefix_cache_evicted_blocks_total"] > 0
        agree(server, follower)
        before = follower.at.copy()
        os.kill(server.engine_pids[0], signal.SIGKILL)
        follower.wait(lambda: any(follower.at[place][0] > before[place][0] for place in before))
        server.wait_until_idle(HEADERS, timeout_s=PATIENCE_S)
        follower.wait(lambda: all(number >= 0 for _, number in follower.at.values()))
        for number in range(40, 44):
            complete_and_follow(number)
        assert all(follower.held.values()), "each has served something since"
        agree(server, follower)
        assert server.terminate() == 0
        follower.wait(lambda: follower.is_over)


def agree(server: ServerProcess, follower: Follower) -> None:
    """One who connects now is told the same, and that is as many blocks as the engines count."""
    other = Follower(server)
    server.wait_until_idle(HEADERS, timeout_s=PATIENCE_S)
    follower.wait(lambda: len(other.at) == len(follower.at) and other.at == follower.at)
    assert other.held == follower.held
    num_cached = server.gauges(HEADERS)["kv_blocks_cached"]
    num_tails = num_cached - sum(map(len, follower.held.values()))
    assert 0 <= num_tails < num_cached, "blocks that are not full are kept too, and not told"
