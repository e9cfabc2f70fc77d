"""What HTTP costs: a real server process whose engine has no model, and a client that does as little as possible.

    python benchmarks/http_overhead.py

(a) 256 streams at once: streamed tokens per second, from the first request sent to the last byte received. Front end,
    engine and this client share the machine.
(b) one stream at a time: time to the first token as the client sees it, less the engine's own part of it (queue and
    prefill, from the access log): what connection, parsing, templating, tokenising and messages between processes add.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

FACTORY = "headway.engine_process.engine_without_model:create_engine"
_MARK = b'"object"'
"""Every event has it once."""
WORDS = "The quick brown fox jumps over the lazy dog and goes home. "


def main() -> None:
    """Run both parts and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="Streams at once in part (a).")
    parser.add_argument("--tokens", type=int, default=400, help="Tokens of each stream in part (a).")
    parser.add_argument("--rounds", type=int, default=3, help="How often part (a) is measured; the best counts.")
    parser.add_argument("--requests", type=int, default=300, help="Requests in part (b).")
    arguments = parser.parse_args()
    server = _start_server(arguments.streams)
    try:
        url_line = _wait_for(server, r"Serving on http://([\d.]+):(\d+)")
        asyncio.run(_measure(arguments, url_line[1], int(url_line[2]), server))
    finally:
        server.terminate()
        server.wait(timeout=60)


def _start_server(num_streams: int) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "headway", "serve", "--port", "0", "--engine-factory", FACTORY),
        *("--max-num-seqs", str(num_streams), "--max-num-batched-tokens", "8192", "--num-kv-blocks", "65536"),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(server: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.search(pattern, line):
            return match
    raise SystemExit("the server did not start")


async def _measure(arguments: argparse.Namespace, host: str, port: int, server: subprocess.Popen[str]) -> None:
    log: list[dict[str, Any]] = []
    reader = threading.Thread(target=_read_log, args=(server, log), daemon=True)
    reader.start()
    await _streams_at_once(host, port, 8, 50)  # warm
    rates = []
    for _ in range(arguments.rounds):
        started_s = time.perf_counter()
        await _streams_at_once(host, port, arguments.streams, arguments.tokens)
        rates.append(arguments.streams * arguments.tokens / (time.perf_counter() - started_s))
    print(f"cores {len(os.sched_getaffinity(0))}")
    print(
        f"(a) {arguments.streams} streams of {arguments.tokens} tokens: best {max(rates):,.0f} tokens/s of "
        f"{', '.join(f'{rate:,.0f}' for rate in rates)}"
    )
    first_s = _times_to_first_token(host, port, arguments.requests)
    server.terminate()
    reader.join()
    added_ms = [
        first_s[line["request_id"]] * 1e3 - line["queue_ms"] - line["prefill_ms"]
        for line in log
        if line["request_id"] in first_s
    ]
    shares = statistics.quantiles(added_ms, n=100)
    print(f"(b) added to the first token: P50 {shares[49]:.2f} ms, P99 {shares[98]:.2f} ms, {len(added_ms)} requests")


def _read_log(server: subprocess.Popen[str], log: list[dict[str, Any]]) -> None:
    assert server.stdout is not None
    log.extend(map(json.loads, server.stdout))


async def _streams_at_once(host: str, port: int, num_streams: int, num_tokens: int) -> None:
    done = await asyncio.gather(*(_count_events(host, port, num_tokens) for _ in range(num_streams)))
    assert all(num_events >= num_tokens for num_events in done), f"tokens are missing: {min(done)} of {num_tokens}"


async def _count_events(host: str, port: int, num_tokens: int) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    request = _request({"max_tokens": num_tokens}, "many", close=True)
    transport, _ = await loop.create_connection(lambda: _Counter(request, ended), host, port)
    try:
        return await ended
    finally:
        transport.close()


class _Counter(asyncio.Protocol):
    """Counts events until the server closes the connection."""

    def __init__(self, request: bytes, ended: asyncio.Future[int]) -> None:
        self._request = request
        self._ended = ended
        self._num_events = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        self._num_events += data.count(_MARK)
        self._tail = data[1 - len(_MARK) :]  # a mark may be cut in two

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(self._num_events)


def _times_to_first_token(host: str, port: int, num_requests: int) -> dict[str, float]:
    """By request id, over one connection that is kept open, as clients do; a plain socket, which adds least itself."""
    first_s = {}
    with socket.create_connection((host, port)) as connection:
        for number in range(num_requests):
            request_id = f"one-{number}"
            request = _request({"max_tokens": 4}, request_id, close=False)
            started_s = time.perf_counter()
            connection.sendall(request)
            answer = _receive_until(connection, b"", b'"content":"')  # the role, which comes with the first token
            first_s[request_id] = time.perf_counter() - started_s
            _receive_until(connection, answer, b"[DONE]\n\n\r\n0\r\n\r\n")
    return first_s


def _receive_until(connection: socket.socket, answer: bytes, mark: bytes) -> bytes:
    while mark not in answer:
        answer += connection.recv(65536)
    return answer


def _request(fields: dict[str, Any], request_id: str, *, close: bool) -> bytes:
    messages = [{"role": "user", "content": WORDS * 3}]
    body = json.dumps({"messages": messages, "stream": True, "ignore_eos": True, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\nconnection: {'close' if close else 'keep-alive'}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    main()
