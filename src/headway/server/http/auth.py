"""Who may come in: API keys, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from headway.server.api.api_errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""For load balancers and orchestrators, which have no key."""
_BROWSER_PATHS = frozenset({"/", "/docs"})


class ApiKeys:
    """The keys that open the server; without any, everybody may come in.

    `Authorization: Bearer KEY` is what API clients send. A browser that opens a page cannot; it is asked for a password
    in its own way (Basic), any user name with the key as the password, and then sends that along by itself.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: bytes | None) -> str | None:
        """Raise 401 unless the header holds one of the keys. Returns its digest; None where none is asked for."""
        if not self._digests or path in OPEN_PATHS:
            return None
        given = _digest(_key_in(authorization or b""))
        # All keys are looked at, and digests have one length: time tells nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(matches):
            scheme = 'Basic realm="headway", charset="UTF-8"' if path in _BROWSER_PATHS else 'Bearer realm="headway"'
            message = "No API key was sent." if not authorization else "The API key is not valid."
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
