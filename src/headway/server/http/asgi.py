"""The few pieces of ASGI that routes are made of: sending an answer, noticing that a client left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from headway.server.api.api_errors import ApiError
from headway.server.metrics.access_log import AccessRecord

JSON = "application/json"


class ClientDisconnected(Exception):
    """Nobody is there to answer."""


def record_of(scope: Scope) -> AccessRecord:
    """What is known about this request so far."""
    record: AccessRecord = scope["headway.record"]
    return record


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Mapping[str, str] | None = None
) -> None:
    """A whole answer."""
    head = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, answer: msgspec.Struct | dict[str, Any], *, status: int = 200) -> None:
    """A record as JSON."""
    await send_bytes(send, msgspec.json.encode(answer), status=status)


async def send_error(send: Send, error: ApiError) -> None:
    """An error object."""
    await send_bytes(send, error.body, status=error.status, headers=error.headers)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, but cancel it at once when the client leaves, and raise `ClientDisconnected` then.

    The body must have been read: after it, the only message that can come is that the client is gone.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = has_left = False

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal has_left
        if not is_over:
            has_left = True
            task.cancel()

    listener = asyncio.ensure_future(_disconnected(receive))
    listener.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:  # else somebody else wants this task to end as well
            raise ClientDisconnected from None
        raise
    finally:
        is_over = True
        listener.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
