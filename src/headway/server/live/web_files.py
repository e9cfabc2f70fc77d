"""Serves the files of the page. They are read once; browsers cache them and revalidate them by their ETag."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PAGE = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
SAFETY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class _WebFile:
    content: bytes
    media_type: str
    etag: str


@cache
def _web_files() -> dict[str, _WebFile]:
    """Return all files by name. Only these names are served, so a request cannot reach any other path."""
    files = {}
    for entry in resources.files("headway.server").joinpath("web").iterdir():
        media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None and entry.is_file():
            content = entry.read_bytes()
            files[entry.name] = _WebFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
    return files


def file_answer(request: Request, name: str) -> Response:
    file = _web_files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {"etag": file.etag, "cache-control": "no-cache", **SAFETY_HEADERS}
    if file.etag in _known_etags(request):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def _known_etags(request: Request) -> set[str]:
    known = request.headers.get("if-none-match", "")
    return {etag.strip().removeprefix("W/") for etag in known.split(",")}
