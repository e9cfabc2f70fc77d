"""The outermost layer: every request gets an id, shows where it is from, ends with an answer, and leaves a log line."""

from __future__ import annotations

import re
import secrets
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.api.api_errors import ApiError, from_exception, from_status, no_such_path, wrong_method
from headway.server.http.asgi import ClientDisconnected, send_error
from headway.server.http.origin import HEADERS as ORIGIN_HEADERS
from headway.server.http.origin import WebPages
from headway.server.metrics.access_log import AccessRecord
from headway.server.services import Services

CLIENT_CLOSED_REQUEST = 499
"""What the log shows for a client that left before the answer began; nobody receives it."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_WANTED = frozenset({b"authorization", b"x-request-id", b"traceparent"}) | ORIGIN_HEADERS


class Gate:
    """An ASGI application around another one."""

    def __init__(
        self, app: ASGIApp, services: Services, routes: frozenset[str], *, paths: tuple[str, ...] = ()
    ) -> None:
        """`routes` are the paths that metrics count by name; others are counted together. `paths` are all there are."""
        self._app = app
        self._services = services
        self._routes = routes
        self._paths = paths
        self._web_pages = WebPages(services.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _wanted_headers(scope)
        record = AccessRecord(
            request_id=_request_id(headers.get(b"x-request-id")),
            method=scope["method"],
            path=scope["path"],
            client=scope["client"][0] if scope.get("client") else "",
            traceparent=headers.get(b"traceparent", b"").decode("latin-1") or None,
        )
        scope["headway.record"] = record
        scope["app"] = self  # makes the router raise for a wrong route, where it would answer with plain text
        request_id_header = (b"x-request-id", record.request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], request_id_header]
            await send(message)

        try:
            self._web_pages.check(headers)
            record.key = self._services.keys.check(scope["path"], headers.get(b"authorization"))
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            record.disconnected = True
            record.status = record.status or CLIENT_CLOSED_REQUEST
        except Exception as error:
            await self._fail(self._as_api_error(error, record), record, send_with_id)
        finally:
            self._close(record)

    async def _fail(self, failure: ApiError, record: AccessRecord, send: Send) -> None:
        """Say what went wrong, if the answer has not begun; else the connection can only be cut."""
        record.note_error(failure)
        if record.status is not None:
            raise failure
        await send_error(send, failure)

    def _as_api_error(self, error: Exception, record: AccessRecord) -> ApiError:
        if not isinstance(error, HTTPException):
            return from_exception(error)
        if error.status_code == HTTPStatus.NOT_FOUND:
            return no_such_path(record.path, self._paths)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return wrong_method(record.method, record.path, (error.headers or {}).get("Allow", ""))
        return from_status(error.status_code, error.headers)

    def _close(self, record: AccessRecord) -> None:
        route = record.path if record.path in self._routes else "other"
        self._services.metrics.count_response(route, record.status or 0)
        for note in self._services.on_request_end:
            note(record)


def _wanted_headers(scope: Scope) -> dict[bytes, bytes]:
    return {name: value for name, value in scope["headers"] if name in _WANTED}


def _request_id(given: bytes | None) -> str:
    """The client's own, if it is one that a header and a log line can carry; else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)
