"""Access control: API keys, which are compared in constant time, and the origins of web pages.

A browser lets any page send requests to any address, including this machine's. Three headers are therefore checked.

* Host must name the server if only this machine can reach it. If evil.example is made to resolve to 127.0.0.1 (DNS
  rebinding), the browser treats its page as of the server's own origin, but the Host header is still evil.example.
* Origin, which browsers send, must be the server's own or one that the operator allows.
* Sec-Fetch-Site marks requests for images and scripts of other sites, which have no Origin.

Programs send neither of the last two. A body must be declared as JSON (see `asgi_io`), which a page of another origin
cannot do without asking for permission first (CORS).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence

from headway.server.api.api_errors import ApiError
from headway.server.server_config import ServerConfig

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no API key, because load balancers and orchestrators have none."""
_BROWSER_PATHS = frozenset({"/", "/docs"})
ORIGIN_HEADERS = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
"""The headers that `WebPages.check` reads."""
ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_SHOWN_CHARS = 100


class ApiKeys:
    """The server's API keys. Without keys, all clients may use the server.

    API clients send `Authorization: Bearer KEY` or, like Anthropic's, `X-Api-Key: KEY`. A browser that opens a page can
    send neither. It asks its user for a name, which may be anything, and for the key as the password (Basic
    authentication), and sends them with every further request.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """Return the digest of the request's key, or None if no key is needed. Raises 401 without a valid key."""
        if not self._digests or path in OPEN_PATHS:
            return None
        given = _digest(_key_in(authorization) if authorization else (api_key or b"").strip())
        # All keys are compared, and all digests have the same length, so the time taken reveals nothing about a key.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(matches):
            scheme = 'Basic realm="headway", charset="UTF-8"' if path in _BROWSER_PATHS else 'Bearer realm="headway"'
            message = "No API key was sent." if not authorization and not api_key else "The API key is not valid."
            raise ApiError(
                401,
                f"{message} Send one as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": scheme},
            )
        return given.hex()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key_in(authorization: bytes) -> bytes:
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


class WebPages:
    """Refuses requests from web pages that may not use the server."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(origin.lower() for origin in config.cors_origin)
        self._hosts: frozenset[str] | None = None
        """Allowed host names of the server; None allows any."""
        if (config.is_local or config.allowed_host) and ANY not in config.allowed_host:
            self._hosts = frozenset(name.lower() for name in (config.host, *config.allowed_host))

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise 403 unless the request comes from a program, or from a page that may use the server."""
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = _without_port(host)
        if name and not self._is_own(name):
            raise _forbidden(
                f"This server does not go by the name '{name[:_SHOWN_CHARS]}'; --allowed-host adds one.",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").strip().lower()
        if origin:
            if not self._is_allowed(origin) and not _is_same_authority(origin, host):
                raise _forbidden(
                    f"Web pages of '{origin[:_SHOWN_CHARS]}' may not use this server; --cors-origin allows it.",
                    code="origin_not_allowed",
                )
        elif (
            headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
            and headers.get(b"sec-fetch-mode") != b"navigate"
            and ANY not in self._origins
        ):
            raise _forbidden("Other web pages may not load anything from this server.", code="origin_not_allowed")

    def _is_own(self, name: str) -> bool:
        return self._hosts is None or name in self._hosts or _is_loopback(name)

    def _is_allowed(self, origin: str) -> bool:
        return origin in self._origins or ANY in self._origins


def _forbidden(message: str, *, code: str) -> ApiError:
    return ApiError(403, message, code=code)


def _is_loopback(name: str) -> bool:
    """Whether a host name is a loopback name or address, which no DNS server can redirect."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return name.removesuffix(".")


def _with_port(host: str, scheme: str) -> str:
    has_port = ":" in host.rpartition("]")[2]
    return host if has_port else f"{host}:{_DEFAULT_PORTS.get(scheme, '')}"


def _is_same_authority(origin: str, host: str) -> bool:
    """Whether an origin, which may be any text, has the host and port of the Host header."""
    scheme, _, authority = origin.partition("://")
    return _with_port(authority, scheme) == _with_port(host, scheme)
