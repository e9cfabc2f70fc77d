"""Reads requests and writes answers over ASGI: bounded bodies, JSON as checked records, and disconnects of clients.

Each body is limited in size and time, all incomplete bodies together are limited in memory, and parsing does not block
the event loop. A complete body counts towards the queue (see `queue_limits`). Before that, thousands of clients could
each send most of a body and then wait, so the memory of incomplete bodies is limited here.
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
    """The client has disconnected, so no answer can be sent."""


def record_of(scope: Scope) -> AccessRecord:
    """Return the access record of the request in `scope`."""
    record: AccessRecord = scope["headway.record"]
    return record


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole answer."""
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
    """Send a record as JSON."""
    await send_bytes(send, msgspec.json.encode(answer), status=status)


async def send_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    """Send an error. `body` replaces the error object if it must have another form than OpenAI's."""
    await send_bytes(send, body or error.body, status=error.status, headers=error.headers)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`. If the client disconnects, cancel it at once and raise `ClientDisconnected`.

    The body must have been read before: after it, a disconnect is the only message that can arrive.
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
        if has_left and task.uncancel() == 0:  # otherwise the task was also cancelled for another reason
            raise ClientDisconnected from None
        raise
    finally:
        is_over = True
        listener.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def skip_body(receive: Receive, *, max_bytes: int) -> None:
    """Read and discard a body, because some clients read the answer only after they have sent the whole body. Stop
    reading if the body is too large or too slow."""
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
    """Check the body's sizes and decode it as a `kind` in one step. Raises 400 if it is invalid."""
    if not body.strip():
        raise bad_request("The body is empty; a JSON object is expected.")
    check_sizes(*sizes_of(body))
    return decode(body, kind)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Decode a body whose sizes have been checked as a `kind`. Raises 400 if it is invalid."""
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
    """Convert a decoded object to a `kind`. `path` is its place in the body, for error messages. Raises 400."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, inside=path) from None


def sizes_of(body: bytes) -> tuple[int, int]:
    """Return the numbers of commas and of opening brackets in a body or a part of one."""
    return body.count(b","), body.count(b"{") + body.count(b"[")


def check_sizes(num_values: int, num_nested: int) -> None:
    """Raise 400 for too many values: unlike long texts, many small values take long to parse."""
    if num_values > LIMITS.max_values or num_nested > LIMITS.max_nested:
        raise bad_request(
            f"The body has {num_values} commas and {num_nested} opening brackets; there may be {LIMITS.max_values} and "
            f"{LIMITS.max_nested}. Send fewer prompts at once."
        )


@functools.cache
def _decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    return msgspec.json.Decoder(kind)


def _explain(message: str, kind: type[msgspec.Struct], *, inside: str = "") -> ApiError:
    """Turn an error like "Expected `int`, got `str` - at `$.n`" of msgspec into one that names the field separately."""
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
    """Return the field names of the record at `path` inside a `kind`."""
    here: Any = kind
    for step in re.findall(r"\w+", path):
        found = next((field for field in msgspec.structs.fields(here) if field.name == step), None)
        inner = _struct_in(found.type) if found else None
        if inner is None:
            return ()
        here = inner
    return tuple(field.name for field in msgspec.structs.fields(here))


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """Return the record type inside a type such as `list[Message] | None`, if there is one."""
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
    """Reads and parses bodies, and counts the memory of incomplete ones."""

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._num_parsing = 0

    async def parse(self, body: bytes, kind: type[_T]) -> _T:
        """Return the body as a `kind`. Raises 400 if it is invalid, 429 if too many large bodies wait for parsing."""
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
        """Read the whole body. Raises 415 if it is not declared as JSON, 413 if it is too large (if possible before
        reading it), 408 if it takes too long, and 429 if too much memory is held by incomplete bodies."""
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
    """Raise 415 unless the body is declared as JSON. Any web page may send other types without asking permission."""
    if content_type.partition(b";")[0].strip().lower() != JSON.encode():
        given = content_type[:100].decode("latin-1")
        raise ApiError(
            415,
            f"The body must be sent with 'Content-Type: {JSON}'{f', not {given!r}' if given else ''}.",
            code="unsupported_media_type",
        )
