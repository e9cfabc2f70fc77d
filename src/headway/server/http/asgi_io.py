"""Requests in and answers out over ASGI: bounded bodies, JSON as checked records, and the end of a client's interest.

A body is bounded in size, in time, and together with all others in memory, and is parsed without holding up the event
loop. Once it is complete it counts in the queue (see `queue_limits`); until then thousands of clients may each send
most of one and wait, and what they may hold altogether is bounded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from headway.errors import did_you_mean
from headway.server.api.api_errors import RETRY_AFTER_S, ApiError, bad_request
from headway.server.limits import LIMITS
from headway.server.metrics.access_log import AccessRecord

JSON = "application/json"
_T = TypeVar("_T", bound=msgspec.Struct)
_AT = re.compile(r" - at `(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_SHOWN_NAME_CHARS = 80


class ClientDisconnected(Exception):
    """The client has left; there is nothing to answer."""


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


async def send_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    """An error object; `body` is one of another form than OpenAI's."""
    await send_bytes(send, body or error.body, status=error.status, headers=error.headers)


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
        if has_left and task.uncancel() == 0:  # else the task is cancelled for another reason too
            raise ClientDisconnected from None
        raise
    finally:
        is_over = True
        listener.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def skip_body(receive: Receive, *, max_bytes: int) -> None:
    """Read a body that nobody wants, so that its client, which reads only when it has sent it, gets to read the answer.
    One that is too large or too slow is left where it is."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMITS.skip_s):
            while num_bytes <= max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def decode_json(body: bytes, kind: type[_T]) -> _T:
    """The body as a `kind`, at once."""
    if not body.strip():
        raise bad_request("The body is empty; a JSON object is expected.")
    check_sizes(*sizes_of(body))
    return decode(body, kind)


def decode(body: bytes, kind: type[_T]) -> _T:
    """As `decode_json`, of a body whose sizes are known to be good."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None


def record_from(value: dict[str, Any], kind: type[_T], path: str = "") -> _T:
    """A decoded object as a `kind`; it stands at `path` in the body."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, inside=path) from None


def sizes_of(body: bytes) -> tuple[int, int]:
    """How many commas and opening brackets a body, or part of one, has."""
    return body.count(b","), body.count(b"{") + body.count(b"[")


def check_sizes(num_values: int, num_nested: int) -> None:
    """Long texts are parsed in no time, many small values are not."""
    if num_values > LIMITS.max_values or num_nested > LIMITS.max_nested:
        raise bad_request(
            f"The body has {num_values} commas and {num_nested} opening brackets; there may be {LIMITS.max_values} and "
            f"{LIMITS.max_nested}. Send fewer prompts at once."
        )


@functools.cache
def _decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    return msgspec.json.Decoder(kind)


def _explain(message: str, kind: type[msgspec.Struct], *, inside: str = "") -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.n`"; clients want the field by itself."""
    at = _AT.search(message)
    own_path = at["path"].removeprefix("$").lstrip(".") if at else ""
    path = _join(inside, own_path) if own_path else inside
    what = _AT.sub("", message)
    if unknown := _UNKNOWN.match(what):
        return _unknown_field(unknown["name"], path, _known_names(own_path, kind))
    if missing := _MISSING.match(what):
        name = _join(path, missing["name"])
        return bad_request(f"'{name}' is required.", param=name)
    if not path:
        return bad_request(f"The body does not fit: {_lower_first(what)}.")
    return bad_request(f"'{path}' does not fit: {_lower_first(what)}.", param=path)


def _unknown_field(name: str, path: str, known: tuple[str, ...]) -> ApiError:
    shown = _join(path, name[:_SHOWN_NAME_CHARS])
    return bad_request(
        f"Unknown field '{shown}'.{did_you_mean(name[:_SHOWN_NAME_CHARS], known)}",
        param=shown,
        code="unknown_field",
    )


def _known_names(path: str, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of the record at `path` inside a `kind`."""
    here: Any = kind
    for step in re.findall(r"\w+", path):
        found = next((field for field in msgspec.structs.fields(here) if field.name == step), None)
        inner = _struct_in(found.type) if found else None
        if inner is None:
            return ()
        here = inner
    return tuple(field.name for field in msgspec.structs.fields(here))


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """The record inside `list[Message] | None` and the like."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    for part in getattr(hint, "__args__", ()):
        if (found := _struct_in(part)) is not None:
            return found
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


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
        if len(body) <= LIMITS.part_bytes:
            return decode_json(body, kind)
        if self._num_parsing >= LIMITS.bodies_at_once:
            raise _too_much()
        self._num_parsing += 1
        try:
            async with self._turn:
                return await self._parse(body, kind)
        finally:
            self._num_parsing -= 1

    async def _parse(self, body: bytes, kind: type[_T]) -> _T:
        num_values = num_nested = 0
        for start in range(0, len(body), LIMITS.part_bytes):
            values, nested = sizes_of(body[start : start + LIMITS.part_bytes])
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
                if self.num_bytes > LIMITS.bodies_at_once * self._max_bytes:
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
