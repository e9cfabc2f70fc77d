"""What a running server tells about its engine: the events of its /live stream."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from headway.errors import ConfigError, HeadwayError

TIMEOUT_S = 10.0
"""A server that is well tells something every second."""


class ServerUnreachableError(HeadwayError):
    """There is no server, or not one that answers."""


class LiveEvent(NamedTuple):
    """One event: "hello" tells what the engine is, "frame" how it is."""

    name: str
    data: dict[str, Any]


def live_events(url: str, api_key: str | None) -> Generator[LiveEvent, None, None]:
    """Events until the server ends the stream, which closing this one does too. `ServerUnreachableError` says what is
    wrong, and what to do about it."""
    address = _address(url)
    connection = _connect(address)
    try:
        yield from _events(_request(connection, address, api_key), url)
    except ssl.SSLError as error:
        raise ServerUnreachableError(f"No TLS connection with {url}: {error.reason or error}.") from error
    except TimeoutError as error:
        raise ServerUnreachableError(f"The server at {url} has said nothing for {TIMEOUT_S:g} s.") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnreachableError(
            f"No server answers at {url} ({error}). Start one with 'headway serve', or name another with --url."
        ) from error
    finally:
        connection.close()


def _address(url: str) -> SplitResult:
    address = urlsplit(url)
    try:
        is_good = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 80) > 0
    except ValueError:  # a port that is none
        is_good = False
    if not is_good:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000, not '{url}'.")
    return address


def _connect(address: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    assert address.hostname is not None
    return kind(address.hostname, address.port, timeout=TIMEOUT_S)


def _request(
    connection: http.client.HTTPConnection, address: SplitResult, api_key: str | None
) -> http.client.HTTPResponse:
    headers = {"accept": "text/event-stream"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        connection.request("GET", f"{address.path.rstrip('/')}/live", headers=headers)
    except (ValueError, UnicodeEncodeError) as error:
        raise ConfigError("The API key cannot be sent: it has characters that no header may have.") from error
    return connection.getresponse()


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[LiveEvent]:
    if response.status == 401:
        raise ServerUnreachableError(
            f"The server at {url} asks for an API key that it knows: give one with --api-key or $HEADWAY_API_KEY."
        )
    if response.status != 200 or "event-stream" not in (response.getheader("content-type") or ""):
        raise ServerUnreachableError(f"What answers at {url} is not a Headway server (status {response.status}).")
    name = ""
    for line in response:
        field, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield LiveEvent(name, json.loads(value))
