"""Request bodies on their way in: bounded in size, in time, and all together in memory; and parsed without holding up
the event loop.

Once it is here, a body counts in the queue (see `limits`). Until then thousands of clients may each send most of one
and wait; what they may hold altogether is bounded here.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from headway.server.api.api_errors import RETRY_AFTER_S, ApiError
from headway.server.http.asgi import JSON, ClientDisconnected
from headway.server.http.json_body import check_sizes, decode, decode_json, sizes_of

_T = TypeVar("_T", bound=msgspec.Struct)

BODIES_AT_ONCE = 32
"""How many bodies of the largest size may be on their way in; of smaller ones, as many more."""
PART_BYTES = 2**18
"""What the event loop looks at in one go. Larger bodies are parsed one after another, and the loop turns in between."""


class BodyReader:
    """Reads and parses bodies, and knows how much of them is held by those that are not complete."""

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._num_parsing = 0

    async def parse(self, body: bytes, kind: type[_T]) -> _T:
        """The body as a `kind`: 400 says what is wrong with it, 429 that too many large ones wait to be parsed."""
        if len(body) <= PART_BYTES:
            return decode_json(body, kind)
        if self._num_parsing >= BODIES_AT_ONCE:
            raise _too_much()
        self._num_parsing += 1
        try:
            async with self._turn:
                return await self._parse(body, kind)
        finally:
            self._num_parsing -= 1

    async def _parse(self, body: bytes, kind: type[_T]) -> _T:
        num_values = num_nested = 0
        for start in range(0, len(body), PART_BYTES):
            values, nested = sizes_of(body[start : start + PART_BYTES])
            num_values, num_nested = num_values + values, num_nested + nested
            await asyncio.sleep(0)
        check_sizes(num_values, num_nested)
        record = decode(body, kind)
        await asyncio.sleep(0)
        return record

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body: 415 if it does not say that it is JSON, 413 if it is too large (said before it is read, where
        possible), 408 if it takes too long, 429 if too much is on its way in."""
        headers = dict(scope["headers"])
        _check_is_json(headers.get(b"content-type", b""))
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._receive(receive)
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not arrive within {self._timeout_s:g} s.",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None

    async def _receive(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        num_held = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                part = message.get("body", b"")
                parts.append(part)
                num_held += len(part)
                self.num_bytes += len(part)
                if num_held > self._max_bytes:
                    raise self._too_large()
                if not message.get("more_body", False):
                    return b"".join(parts)
                if self.num_bytes > BODIES_AT_ONCE * self._max_bytes:
                    raise _too_much()
        finally:
            self.num_bytes -= num_held

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than {self._max_bytes} bytes, which is all that this server takes.",
            code="body_too_large",
            headers={"connection": "close"},
        )


def _too_much() -> ApiError:
    return ApiError(
        429,
        "Too many large bodies are on their way in. Please retry later.",
        code="too_many_bodies",
        headers={"retry-after": str(RETRY_AFTER_S), "connection": "close"},
    )


def _check_is_json(content_type: bytes) -> None:
    """A body of any other type may come from any web page, without the browser asking here first."""
    if content_type.partition(b";")[0].strip().lower() != JSON.encode():
        given = content_type[:100].decode("latin-1")
        raise ApiError(
            415,
            f"The body must be sent with 'Content-Type: {JSON}'{f', not {given!r}' if given else ''}.",
            code="unsupported_media_type",
        )
