"""The prefix cache of a server process as clients, tenants and operators see it. The engine has no model."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.integration.server_process import ServerProcess, running_server

FACTORY = ("--engine-factory", "headway.engine_process.engine_without_model:create_engine", "--no-access-log")
KEYS = ("--api-key", "alice", "--api-key", "bob")
BLOCK_SIZE, NUM_BLOCKS = 16, 64
PROMPT = "The metro of Porto has six lines, and all of them meet at one station in the middle of the town. "


@pytest.fixture(scope="module")
def sockets() -> Iterator[tuple[str, str]]:
    """Where events of the cache are published, and where they are replayed."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{folder}/events", f"ipc://{folder}/replay"


@pytest.fixture(scope="module")
def server(sockets: tuple[str, str]) -> Iterator[ServerProcess]:
    """With two keys, and nothing said about salts."""
    events = json.dumps({"endpoint": sockets[0], "replay_endpoint": sockets[1], "topic": "kv@here@small"})
    cache = ("--kv-events", "--kv-events-config", events, "--num-kv-blocks", str(NUM_BLOCKS), "--max-model-len", "512")
    with running_server(*FACTORY, *KEYS, *cache, "--enable-admin-routes") as running:
        yield running


def complete(server: ServerProcess, prompt: Any, *, key: str = "alice", **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4} | fields
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_equal_requests_of_one_key_share_and_of_two_do_not(server: ServerProcess) -> None:
    first, second = complete(server, PROMPT), complete(server, PROMPT)
    num_tokens = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert num_tokens - BLOCK_SIZE <= cached(second) < num_tokens
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert cached(complete(server, PROMPT, key="bob")) == 0
    assert cached(complete(server, PROMPT, key="bob")) == cached(second)
    assert cached(complete(server, PROMPT, cache_salt="mine")) == 0
    assert cached(complete(server, PROMPT, key="bob", cache_salt="mine")) == 0
    assert cached(complete(server, PROMPT, cache_salt="mine")) == cached(second)


def documented_digests(tokens: list[int], *, key: str, salt: str, block_size: int) -> set[str]:
    """As docs/many_machines.md says it, and with nothing of Headway."""
    whole_salt = f"{hashlib.sha256(key.encode()).hexdigest()}:{salt}"
    digest = hashlib.blake2b(whole_salt.encode(), digest_size=32, person=b"headway-root").digest()
    digests = set()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        packed = struct.pack(f"<{block_size}i", *tokens[start : start + block_size])
        digest = hashlib.blake2b(digest + packed, digest_size=32).digest()
        digests.add(digest.hex())
    return digests


def test_a_router_outside_knows_what_is_cached(server: ServerProcess) -> None:
    prompt, headers = [place * 7 + 10 for place in range(80)], {"authorization": "Bearer alice"}
    with httpx.stream("GET", f"{server.url}/v1/kv_events", headers=headers, timeout=60) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        block_size = json.loads(next(lines))["block_size"]
        assert block_size == BLOCK_SIZE
        first = json.loads(next(lines))
        assert first["is_whole"]
        complete(server, prompt, cache_salt="mine")
        wanted = documented_digests(prompt, key="alice", salt="mine", block_size=block_size)
        assert len(wanted) == 5 and not wanted & set(first["stored"])
        while wanted:
            wanted -= set(json.loads(next(lines))["stored"])


def test_a_gateway_gets_tokens_and_a_reset_empties_the_cache(server: ServerProcess, sockets: tuple[str, str]) -> None:
    prompt, headers = [place * 5 + 11 for place in range(80)], {"authorization": "Bearer bob"}
    complete(server, prompt, key="bob", cache_salt="mine")
    wanted = documented_digests(prompt, key="bob", salt="mine", block_size=BLOCK_SIZE)
    server.wait_until_idle(headers, timeout_s=10)
    held: dict[bytes, list[int]] = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 20_000
        socket.connect(sockets[1])
        for _ in range(2):  # once before a reset, and once after it
            held.clear()
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while (frames := socket.recv_multipart())[3]:
                assert frames[1] == b"kv@here@small"
                apply(msgspec.msgpack.decode(frames[3]), held)
            if not held:
                return
            assert {digest.hex() for digest in held} >= wanted
            assert {token for digest in held if digest.hex() in wanted for token in held[digest]} == set(prompt)
            answer = httpx.post(f"{server.url}/reset_prefix_cache", headers=headers, timeout=60)
            assert answer.status_code == 200 and answer.json()["num_kept_blocks"] == 0, answer.text
            assert answer.json()["num_forgotten_blocks"] >= len(held)
            assert cached(complete(server, [1, 2, 3], key="bob")) == 0
    raise AssertionError("the cache is not empty after a reset")


def apply(batch: list[Any], held: dict[bytes, list[int]]) -> None:
    """What one message of vLLM's format changes."""
    for name, *fields in batch[1]:
        if name == "AllBlocksCleared":
            held.clear()
        elif name == "BlockRemoved":
            for digest in fields[0]:
                del held[digest]
        else:
            digests, _, tokens, size = fields[:4]
            held |= {digest: tokens[place * size :][:size] for place, digest in enumerate(digests)}


def test_completions_and_prompts_of_one_request(server: ServerProcess) -> None:
    prompt = "Several answers to one question. " * 3
    several = {"n": 3, "temperature": 1.0, "seed": 1}
    first, second = (complete(server, prompt, **several) for _ in range(2))
    assert cached(first) == 0, "what its own completions share is not found: it was not there before"
    assert first["usage"]["prompt_tokens"] - BLOCK_SIZE <= cached(second) < first["usage"]["prompt_tokens"]
    twice = complete(server, [prompt, prompt])
    assert twice["usage"]["prompt_tokens"] == 2 * first["usage"]["prompt_tokens"]
    assert cached(twice) == 2 * cached(second)


def test_metrics_agree_with_what_clients_are_told(server: ServerProcess) -> None:
    headers = {"authorization": "Bearer alice"}
    before = server.wait_until_idle(headers, timeout_s=10)
    prompt = "A prompt that only this test has, and long enough for some blocks of sixteen tokens each."
    answers = [complete(server, prompt) for _ in range(3)]
    after = server.wait_until_idle(headers, timeout_s=10)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["prefix_cache_queries_total"] == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert grown["prefix_cache_hits_total"] == grown["prefix_cache_saved_tokens_total"] == sum(map(cached, answers)) > 0
    assert grown["prefix_cache_inserted_blocks_total"] > 0 == grown["recomputed_tokens_total"]
    assert 0 < after["prefix_cache_hit_rate"] < 1
    assert after["kv_blocks_live"] == 0 < after["kv_blocks_cached"]
    assert after["kv_blocks_cached"] + after["kv_blocks_free"] == NUM_BLOCKS


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"use_beam_search": True}, {"logprobs": 1}], ids=str)
def test_what_needs_a_model_is_refused_without_one(server: ServerProcess, fields: dict[str, Any]) -> None:
    headers = {"authorization": "Bearer alice"}
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, **fields}, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *fields)


def test_a_prompt_that_is_to_be_kept_survives_a_flood(server: ServerProcess) -> None:
    keep, leave = "These words are to be kept for long. " * 3, "These other words may be forgotten soon. " * 3
    complete(server, keep, cache_ttl_s=600)
    complete(server, leave)
    for number in range(12):
        complete(server, [number] * 200)
    assert cached(complete(server, keep)) > 0
    assert cached(complete(server, leave)) == 0


def test_the_command_shows_an_idle_servers_cache(server: ServerProcess) -> None:
    gauges = server.wait_until_idle({"authorization": "Bearer bob"}, timeout_s=10)
    command = [sys.executable, "-m", "headway", "kv", "--url", server.url, "--api-key", "bob"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_cached = int(gauges["kv_blocks_cached"])
    assert f"0 live · {num_cached} cached · {NUM_BLOCKS - num_cached} free" in done.stdout
    drawn = done.stdout[done.stdout.index("free  \n") :]
    assert drawn.count("+") == num_cached and drawn.count(".") == NUM_BLOCKS - num_cached
