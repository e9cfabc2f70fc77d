"""GET /v1/kv_events: the contents of the replicas' prefix caches as server-sent events."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive, Scope, Send

from headway.front.watch_streams import CacheEvent, CacheStream
from headway.server.api.api_errors import ApiError, overloaded
from headway.server.api.response_models import KVEvent
from headway.server.api.routes import STREAM_HEADERS
from headway.server.http.asgi_io import send_bytes, until_disconnect
from headway.server.limits import LIMITS
from headway.server.services import Services
from headway.wire.messages import EngineReady

DIGEST_RULE = (
    "blake2b-256 of the digest of the block before and the block's tokens (int32, little-endian); before the first "
    "block: blake2b-256 of the salt, personalised with 'headway-root'"
)


class KVEvents:
    """GET /v1/kv_events: streams the contents of each replica's prefix cache and all later changes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._num_followers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = self._check()
        if scope["method"] == "HEAD":
            await send_bytes(send, b"", content_type="text/event-stream")
            return
        self._num_followers += 1
        try:
            async with self._services.engine.follow_caches() as stream:
                await until_disconnect(receive, self._answer(info, stream, send))
        finally:
            self._num_followers -= 1

    def _check(self) -> EngineReady:
        """Return the engine's properties, or raise if caches cannot be followed."""
        if not self._services.config.kv_events:
            raise ApiError(
                404, "This server does not tell what its caches hold; start it with --kv-events.", code="kv_events_off"
            )
        info = self._services.info
        if not info.prefix_caching:
            raise ApiError(
                404,
                "There is no prefix cache to follow: the server was started with --no-enable-prefix-caching.",
                code="prefix_caching_off",
            )
        if self._num_followers >= LIMITS.max_followers:
            raise overloaded(
                f"{self._num_followers} clients follow the caches already. Please retry later.",
                code="too_many_followers",
            )
        return info

    async def _answer(self, info: EngineReady, stream: CacheStream, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        hello = {
            "num_replicas": max(len(self._services.engine.replicas), 1),
            "block_size": info.block_size,
            "digest": DIGEST_RULE,
        }
        data: bytes | None = b"event: hello\ndata: %s\n\n" % msgspec.json.encode(hello)
        while data is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await self._next(stream)
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, stream: CacheStream) -> bytes | None:
        try:
            async with asyncio.timeout(LIMITS.quiet_s):
                event = await anext(stream)
        except TimeoutError:
            return b": nothing new\n\n"
        except StopAsyncIteration:  # the server stops
            return None
        return b"event: blocks\ndata: %s\n\n" % msgspec.json.encode(_told(event))


def _told(event: CacheEvent) -> KVEvent:
    return KVEvent(
        replica=event.place,
        epoch=event.epoch,
        number=event.number,
        block_size=event.block_size,
        is_whole=event.is_whole,
        stored=[digest.hex() for digest in event.stored],
        evicted=[digest.hex() for digest in event.evicted],
    )
