"""A server that says what the test wrote down, at the times it wrote down: for clients of streams."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
"""


@dataclass(frozen=True)
class Answer:
    """What one request gets: pieces of the body, each so long after the one before."""

    pieces: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    drop: bool = False
    """Close the connection after the pieces instead of ending the body."""
    is_chunked: bool = True


Script = Callable[[dict[str, Any]], Answer]


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_event(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage_event(num_in: int, num_out: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": num_in, "completion_tokens": num_out}})


DONE = b"data: [DONE]\n\n"


def steady(body: dict[str, Any], *, first_s: float = 0.0, gap_s: float = 0.0) -> Answer:
    """As many tokens as asked for, one in each event."""
    number = body["max_tokens"]
    pieces = [(gap_s if place else first_s, text_event("a")) for place in range(number - 1)]
    pieces.append((gap_s if number > 1 else first_s, text_event("a", "length")))
    return Answer([*pieces, (0.0, usage_event(len(body["prompt"]), number) + DONE)])


@dataclass
class SSEServer:
    """In a thread of its own while it is entered."""

    script: Script
    metrics: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    num_now: int = 0
    most_at_once: int = 0
    num_connections: int = 0
    headers: list[str] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> SSEServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._connection, "127.0.0.1", 0), self._loop)
        self._server = server.result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                self.headers.append(text)
                length = next(
                    (int(line[15:]) for line in text.lower().splitlines() if line[:15] == "content-length:"), 0
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                if not await self._answer(text.split()[1], body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/models":
            return self._send_whole(writer, {"data": [{"id": "m", "max_model_len": 4096}]})
        if path == "/metrics":
            return self._send_whole(writer, self.metrics, status=200 if self.metrics else 404)
        if path == "/detokenize":
            return self._send_whole(writer, {"prompt": " ".join(map(str, body["tokens"]))})
        self.bodies.append(body)
        self.arrivals_s.append(time.perf_counter())
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            return await self._stream(self.script(body), writer)
        finally:
            self.num_now -= 1

    def _send_whole(self, writer: asyncio.StreamWriter, content: Any, status: int = 200) -> bool:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d Fine\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        return True

    async def _stream(self, answer: Answer, writer: asyncio.StreamWriter) -> bool:
        framing = b"transfer-encoding: chunked\r\n" if answer.is_chunked else b"connection: close\r\n"
        writer.write(b"HTTP/1.1 %d Fine\r\ncontent-type: text/event-stream\r\n" % answer.status + framing + b"\r\n")
        for delay_s, piece in answer.pieces:
            if delay_s:
                await asyncio.sleep(delay_s)
            writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n" if answer.is_chunked else piece)
        if answer.drop:
            await writer.drain()
            return False
        if answer.is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return answer.is_chunked
