"""Requests that are much work, for few bytes or for many: what they ask of tokenizer, parser and loop is bounded."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.integration.server_process import ServerProcess
from tests.integration.under_attack import attacked_server, unharmed

pytestmark = pytest.mark.flaky(reruns=2)

ATTACK_S = 1.2  # longer than the longest pause that others may notice
NUM_ATTACKERS = 3
JSON = {"content-type": "application/json"}
LEAVE = httpx.Timeout(30, read=0.1)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = [f"{number:08x}" for number in range(1024)]
"""8,192 characters, as many as bad words may have."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with attacked_server() as running:
        yield running


def attack(server: ServerProcess, path: str, body: bytes | Callable[[int], bytes]) -> Counter[int]:
    """Send a body over and over from several clients, while another user must notice nothing. Returns the statuses."""
    statuses: Counter[int] = Counter()

    def send(until_s: float) -> None:
        with httpx.Client(base_url=server.url, timeout=60, headers=JSON) as client:
            number = 0
            while time.monotonic() < until_s:
                content = body if isinstance(body, bytes) else body(number)
                statuses[client.post(path, content=content).status_code] += 1
                number += 1

    with unharmed(server):
        until_s = time.monotonic() + ATTACK_S
        threads = [threading.Thread(target=send, args=(until_s,)) for _ in range(NUM_ATTACKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return statuses


def packed(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_megabyte_of_bad_words_for_a_hundred_prompts_is_refused(server: ServerProcess) -> None:
    words = [f"{number} word " * 90 for number in range(1000)]
    body = packed(prompt=["Hi"] * 100, bad_words=words, max_tokens=1)
    assert set(attack(server, COMPLETIONS, body)) == {400}


def test_as_many_bad_words_as_are_allowed_for_a_thousand_prompts(server: ServerProcess) -> None:
    body = packed(prompt=[[5]] * 500, bad_words=WORDS, logit_bias={str(i): 1 for i in range(1024)}, max_tokens=1)
    assert set(attack(server, COMPLETIONS, body)) <= {200, 429}


def test_stop_strings_that_nearly_match(server: ServerProcess) -> None:
    text = "The line never stops, and so nobody waits: a seat that gets free is taken at the very next stop. "
    stops = [(text * 10)[:1000] + str(number) for number in range(8)]
    body = packed(prompt="Hi", stop=stops, n=128, temperature=1, max_tokens=40)
    assert set(attack(server, COMPLETIONS, body)) <= {200, 429}


def test_eight_megabytes_to_tokenise_are_refused(server: ServerProcess) -> None:
    assert set(attack(server, "/tokenize", packed(prompt="hello world. " * 600_000))) <= {400, 429}
    assert set(attack(server, COMPLETIONS, packed(prompt="a" * 8_000_000))) <= {400, 429}
    message = {"role": "user", "content": "x" * 1000}
    assert set(attack(server, CHAT, packed(messages=[message] * 7_000))) <= {400, 429}


def test_as_much_as_is_tokenised(server: ServerProcess) -> None:
    info = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    text = "hello, world. " * (info["max_model_len"] * 32 // 14)
    assert set(attack(server, "/tokenize", packed(prompt=text))) <= {200, 429}


def test_very_many_messages_parts_values_and_ids(server: ServerProcess) -> None:
    message, part = '{"role":"user","content":""}', '{"type":"text","text":""}'
    bodies = [
        f'{{"messages":[{",".join([message] * 60_000)}]}}',
        f'{{"messages":[{{"role":"user","content":[{",".join([part] * 60_000)}]}}]}}',
        f'{{"messages":[{message}],"metadata":[{",".join(["{}"] * 2_000_000)}]}}',
    ]
    assert set(attack(server, CHAT, lambda number: bodies[number % len(bodies)].encode())) == {400}
    ids = b'{"tokens":[' + b"5," * 4_000_000 + b"5]}"
    assert set(attack(server, "/detokenize", ids)) <= {400, 429}


def test_bursts_of_requests_that_are_left_at_once(server: ServerProcess) -> None:
    """A thousand prompts at a time, whose client is gone before they are prepared."""
    body = packed(prompt=[[5] * 500] * 500, bad_words=WORDS, max_tokens=1000)
    num_left = 0
    with unharmed(server):
        until_s = time.monotonic() + ATTACK_S
        while time.monotonic() < until_s:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{server.url}{COMPLETIONS}", content=body, headers=JSON, timeout=LEAVE)
                num_left -= 1
            num_left += 1
    assert num_left > 0
