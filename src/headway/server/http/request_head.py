"""Checks the head of a request: it must have one Host header and a target on this server.

A proxy and this server may understand a request with no Host header, or with several, in different ways. RFC 9112
requires 400 in both cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import httptools

from headway.server.api.api_errors import ApiError, bad_request

NO_HTTP = bad_request("This is not a valid HTTP request.", code="invalid_http")
_NO_PROXY = bad_request("This server is no proxy: it does not take CONNECT.", code="invalid_http")
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
_OLD_VERSIONS = frozenset({"0.9", "1.0"})
"""Versions of HTTP that do not require a Host header."""


def checked_target(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the target as a path and a query, or `*`. Raises `ApiError` for a head that must not be served."""
    hosts = [value.strip() for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version not in _OLD_VERSIONS):
        raise _bad_host(f"A request must have one Host header, not {len(hosts) or 'none'}.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise _bad_host("The Host header is not a host with or without a port.")
    if method == b"CONNECT":
        raise _NO_PROXY
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target
    return _without_authority(target, hosts)


def _without_authority(target: bytes, hosts: Sequence[bytes]) -> bytes:
    """Return path and query of a target like `http://host/path`, whose host must equal that of the Host header."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise NO_HTTP from None
    if url.schema is None or url.schema.lower() not in (b"http", b"https") or not url.host:
        raise NO_HTTP
    host = b"[%b]" % url.host if b":" in url.host else url.host
    authority = host if url.port is None else b"%b:%d" % (host, url.port)
    if hosts and hosts[0].lower() != authority.lower():
        raise _bad_host("The target names another host than the Host header.")
    path: bytes = url.path or b"/"
    return path if url.query is None else path + b"?" + url.query


def _bad_host(message: str) -> ApiError:
    return bad_request(message, code="invalid_host")
