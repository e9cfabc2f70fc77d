"""Wheels come from where pip and uv are told to look, over HTTP, from folders, as JSON and as HTML."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.loader.package_index import NoWheelError, fetch_wheel
from headway.progress import ProgressLines

WHEEL = "some_thing-1.0-py3-none-any.whl"
CONTENT = b"a wheel" * 100_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OTHERS = ["some_thing-1.0.tar.gz", "some_thing-1.0.1-py3-none-any.whl", "some_thing_more-1.0-py3-none-any.whl"]


class Index(http.server.ThreadingHTTPServer):
    """An index on this machine: pages by their paths, and what was asked with which name and password."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, tuple[str, bytes]] = {f"/files/{WHEEL}": ("application/zip", CONTENT)}
        self.asked: list[tuple[str, str | None]] = []
        self.missing_bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def publish_html(self, path: str, sha256: str = SHA256) -> None:
        links = [f"<a href='/files/{name}'>{name}</a>" for name in OTHERS]
        links.append(f"<a href='../../files/{WHEEL}#sha256={sha256}' data-requires-python='&gt;=3.8'>{WHEEL}</a>")
        self.pages[path] = ("text/html", "<br>".join(links).encode())


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        kind, body = self.server.pages.get(self.path, ("", b""))
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - self.server.missing_bytes] if body == CONTENT else body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    with contextlib.closing(Index()) as server:
        server.close = server.server_close  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetch(folder: Path, progress: ProgressLines | None = None) -> Path:
    return fetch_wheel("some-thing", "1.0", folder, progress or ProgressLines(None))


def test_from_the_page_of_an_index_with_progress(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.publish_html("/simple/some-thing/")
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple/")
    progress = ProgressLines(None, "Downloading", "bytes")
    assert fetch(tmp_path, progress).read_bytes() == CONTENT
    assert progress.line.startswith("Downloading: 1 of 1 MB (100%)")
    assert [path for path, _ in index.asked] == ["/simple/some-thing/", f"/files/{WHEEL}"]


def test_from_the_json_of_an_index(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [{"url": f"{index.url}/files/{name}", "hashes": {}} for name in OTHERS]
    files.append({"url": f"{index.url}/files/{WHEEL}", "hashes": {"sha256": SHA256}})
    page = json.dumps({"files": files}).encode()
    index.pages["/simple/some-thing/"] = ("application/vnd.pypi.simple.v1+json", page)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{index.url}/simple")
    assert fetch(tmp_path).name == WHEEL


def test_the_next_place_is_asked_and_each_says_why_not(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/first")
    monkeypatch.setenv("UV_INDEX", f"mirror={index.url}/second")
    with pytest.raises(NoWheelError) as caught:
        fetch(tmp_path)
    reasons = str(caught.value).split("; ")
    assert reasons[0].endswith("/wheels has no wheel of some-thing 1.0")
    assert reasons[1] == f"{index.url}/first/some-thing/: HTTP Error 404: Not Found"
    index.publish_html("/second/some-thing/")
    assert fetch(tmp_path).read_bytes() == CONTENT
    (tmp_path / "wheels" / WHEEL).write_bytes(b"the nearest")
    assert fetch(tmp_path).read_bytes() == b"the nearest"


def test_pips_configuration_is_read(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.publish_html("/extra/some-thing/")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nindex-url = {index.url}/none\nextra-index-url =\n    {index.url}/none\n    {index.url}/extra\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch(tmp_path).read_bytes() == CONTENT


def test_a_password_goes_to_its_host_and_into_no_message(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:p%40ss@") + "/private")
    with pytest.raises(NoWheelError) as caught:
        fetch(tmp_path)
    assert "ss@" not in str(caught.value) and "p%40ss" not in str(caught.value)
    assert index.asked == [("/private/some-thing/", f"Basic {base64.b64encode(b'me:p@ss').decode()}")]


@pytest.mark.parametrize(("missing", "sha256", "reason"), [(9, SHA256, "ended after"), (0, "0" * 64, "SHA-256")])
def test_what_is_not_whole_is_not_taken(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, sha256: str, reason: str
) -> None:
    index.publish_html("/simple/some-thing/", sha256)
    index.missing_bytes = missing
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple/")
    with pytest.raises(NoWheelError, match=reason):
        fetch(tmp_path)
