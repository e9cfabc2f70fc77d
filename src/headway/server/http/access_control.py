"""Which clients may use the server: API keys, compared in constant time, and web pages by their origin.

A browser lets any page send requests to any address, this machine's too.

* The Host header must name the server, where only this machine can reach it. A page of evil.example whose name is made
  to point to 127.0.0.1 (DNS rebinding) is of the server's own origin for the browser, but asks for evil.example.
* The Origin header, which browsers send along, must be the server's own or one that the operator allows.
* Requests of other sites' images and scripts have no Origin; browsers mark them in another way (Sec-Fetch-Site).

Programs send none of the last two. Bodies must say that they are JSON (see `asgi_io`), which no page of another origin
can without asking first (CORS).
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

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""For load balancers and orchestrators, which have no key."""
_BROWSER_PATHS = frozenset({"/", "/docs"})
ORIGIN_HEADERS = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
"""What `WebPages.check` looks at."""
ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_SHOWN_CHARS = 100


class ApiKeys:
    """The keys that open the server; without any, all clients may use it.

    `Authorization: Bearer KEY` is what API clients send, or `X-Api-Key: KEY`, as Anthropic's do. A browser that opens a
    page cannot; it is asked for a password in its own way (Basic), any user name with the key as the password, and then
    sends that along by itself.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """Raise 401 unless a header holds one of the keys. Returns its digest; None where none is asked for."""
        if not self._digests or path in OPEN_PATHS:
            return None
        given = _digest(_key_in(authorization) if authorization else (api_key or b"").strip())
        # All keys are looked at, and digests have one length: time tells nothing about any of them.
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
    """Refuses what comes from web pages that may not use the server."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(origin.lower() for origin in config.cors_origin)
        self._hosts: frozenset[str] | None = None
        """The server's names; None: any."""
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
    """Names that no DNS server has a say in."""
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
    """Whether an origin, which may be any text, is the one that a Host header names."""
    scheme, _, authority = origin.partition("://")
    return _with_port(authority, scheme) == _with_port(host, scheme)
