"""Fetches a wheel from the package indexes that pip and uv are configured to use, without running either of them.

An environment made by `uv venv` or `python -m venv --without-pip` has no pip. Indexes use the simple API: a page for
each project, as JSON or HTML, with a link and a SHA-256 for each file. The `find-links` folders are searched first,
then the index and the extra indexes, as environment variables or pip's configuration files name them."""

from __future__ import annotations

import base64
import configparser
import contextlib
import hashlib
import html.parser
import json
import netrc
import os
import re
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.progress import Meter

DEFAULT_INDEX = "https://pypi.org/simple"
_TIMEOUT_S = 60.0
"""The longest wait for the next byte."""
_MOST_PAGE_BYTES = 2**25
_CHUNK_BYTES = 2**18
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


class NoWheelError(Exception):
    """No index has the wheel, or it could not be fetched. The message gives the reasons."""


@dataclass(frozen=True)
class WheelLink:
    url: str
    sha256: str | None


def fetch_wheel(project: str, version: str, folder: Path, progress: Meter) -> Path:
    """Download the project's wheel of this version into the folder. Raises `NoWheelError`, which lists the answer of
    every place that was asked."""
    beginning, reasons = f"{re.sub(r'[-_.]+', '_', project).lower()}-{version}-", []
    for place, is_index in _places():
        page = f"{place.rstrip('/')}/{project}/" if is_index else place
        try:
            links = _links(page)
            found = next((link for name, link in links if name.lower().startswith(beginning)), None)
            if found is not None:
                return _download(found, folder, progress)
            reasons.append(f"{_shown(page)} has no wheel of {project} {version}")
        except (OSError, ValueError) as error:
            reasons.append(f"{_shown(page)}: {_reason(error)}")
    raise NoWheelError("; ".join(reasons))


def _places() -> Iterator[tuple[str, bool]]:
    """Yields the addresses to search, and whether each is an index, which has a page for each project."""
    options = _pip_options()

    def named(*names: str) -> list[str]:
        texts = [os.environ[name] for name in names if name in os.environ]
        option = names[0].removeprefix("PIP_").lower().replace("_", "-")
        return (texts[0] if texts else options.get(option, "")).split()

    for place in named("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        yield _as_url(place), False
    if named("PIP_NO_INDEX", "UV_NO_INDEX")[:1] not in ([], ["0"], ["no"], ["false"]):
        return
    for place in named("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")[:1] or [DEFAULT_INDEX]:
        yield _as_url(place), True
    for place in named("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        yield _as_url(place), True


def _pip_options() -> dict[str, str]:
    """The options of pip's configuration files; nearer files override. Empty if pip is configured to read none."""
    if os.environ.get("PIP_CONFIG_FILE") == os.devnull:
        return {}
    home = Path(os.environ.get("HOME", "/"))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/pip.conf"), home / ".pip/pip.conf", config / "pip/pip.conf", Path(sys.prefix) / "pip.conf"]
    if sys.platform == "darwin":
        files.insert(1, home / "Library/Application Support/pip/pip.conf")
    if os.environ.get("PIP_CONFIG_FILE"):
        files.append(Path(os.environ["PIP_CONFIG_FILE"]))
    parser = configparser.RawConfigParser()
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        parser.read(files, encoding="utf-8")
    return {
        name: value
        for section in ("global", "download")
        if parser.has_section(section)
        for name, value in parser.items(section)
    }


def _as_url(place: str) -> str:
    """The URL of an address or a folder. In uv's settings an index may have a name before it: name=https://…"""
    place = re.sub(r"^[\w-]+=(?=\w+://)", "", place)
    return place if re.match(r"\w+://", place) else Path(place).expanduser().absolute().as_uri()


def _links(page: str) -> Iterator[tuple[str, WheelLink]]:
    """Yields the name and link of each wheel on a page or in a folder."""
    if page.startswith("file:"):
        folder = Path(urllib.request.url2pathname(urllib.parse.urlsplit(page).path))
        if folder.is_dir() and not (folder / "index.html").is_file():
            yield from ((path.name, WheelLink(path.as_uri(), None)) for path in sorted(folder.glob("*.whl")))
            return
        page = (folder / "index.html" if folder.is_dir() else folder).as_uri()
    with _open(page) as answer:
        body = answer.read(_MOST_PAGE_BYTES)
        base, kind = answer.geturl(), answer.headers.get_content_type()
    if kind.endswith("json"):
        found = [(str(file["url"]), file.get("hashes", {}).get("sha256")) for file in json.loads(body)["files"]]
    else:
        parser = _Anchors()
        parser.feed(body.decode("utf-8", "replace"))
        found = [_without_hash(target) for target in parser.targets]
    for target, sha256 in found:
        url = urllib.parse.urljoin(base, target)
        name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        if name.endswith(".whl"):
            yield name, WheelLink(url, sha256)


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target:
            self.targets.append(target)


def _without_hash(target: str) -> tuple[str, str | None]:
    url, _, fragment = target.partition("#")
    kind, _, value = fragment.partition("=")
    return url, value if kind == "sha256" else None


def _download(link: WheelLink, folder: Path, progress: Meter) -> Path:
    target = folder / urllib.parse.unquote(urllib.parse.urlsplit(link.url).path.rpartition("/")[2])
    digest, done = hashlib.sha256(), 0
    with _open(link.url) as answer, target.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0) or None
        while chunk := answer.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress.at(done, total)
    if total is not None and done != total:
        raise ValueError(f"the download ended after {done:,} of {total:,} bytes")
    if link.sha256 is not None and digest.hexdigest() != link.sha256:
        raise ValueError(f"{target.name} has another SHA-256 than its index says")
    return target


def _open(url: str) -> Any:
    """Open a URL with the environment's proxy and the certificates that pip is configured to trust. The name and
    password come from the address or from ~/.netrc and are sent to no other host."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers={"Accept": _ACCEPT})
    name, password = parts.username, parts.password
    if name is None and parts.scheme == "https" and parts.hostname:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            name, _, password = netrc.netrc().authenticators(parts.hostname) or (None, None, None)
    if name is not None:
        secret = f"{urllib.parse.unquote(name)}:{urllib.parse.unquote(password or '')}".encode()
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(secret).decode()}")
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or _pip_options().get("cert")
    context = ssl.create_default_context(cafile=certificates) if parts.scheme == "https" else None
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)


def _shown(url: str) -> str:
    """The URL without its password, for messages."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        return str(error.reason)
    return str(error)
