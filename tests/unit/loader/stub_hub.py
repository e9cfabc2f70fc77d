"""A hub on this machine that answers what huggingface_hub asks of the real one: a listing with digests, small files
from the hub itself, large ones by a redirect to a storage of another origin, which answers ranges. Answers can be cut
off, changed or refused."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections import defaultdict, deque
from dataclasses import dataclass, field

COMMIT = "c" * 40
LFS_BYTES = 1000
"""Files of this size, and larger ones, are in the storage."""


@dataclass(frozen=True)
class Cut:
    """The connection ends after this many bytes."""

    after: int


@dataclass(frozen=True)
class Stalled:
    """After this many bytes, nothing more comes until the client is gone."""

    after: int
    is_stalled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Changed:
    """The first byte is another one."""


@dataclass(frozen=True)
class Whole:
    """All bytes are sent, although only a part was asked for."""


@dataclass(frozen=True)
class Refused:
    """A status, and what the hub says of it."""

    status: int
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)


Fault = Cut | Stalled | Changed | Whole | Refused


@dataclass(frozen=True)
class Asked:
    """A request for a content."""

    name: str
    at_storage: bool
    range: str | None
    authorization: str | None


class StubHub:
    """Repositories by name, each with files at revisions."""

    def __init__(self) -> None:
        self.revisions: dict[tuple[str, str], str] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.asked: list[Asked] = []
        self.listings: list[str | None] = []
        """The authorization of each request for a listing."""
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        """By file name: what happens to the next requests for its content."""
        self.refusal: Refused | None = None
        """How listings are refused."""
        self._hub, self._storage = (_Server(self, is_storage) for is_storage in (False, True))

    def __enter__(self) -> StubHub:
        self._hub.start()
        self._storage.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._hub.end()
        self._storage.end()

    @property
    def url(self) -> str:
        return self._hub.url

    @property
    def storage_url(self) -> str:
        return self._storage.url

    def publish(self, repo: str, files: dict[str, bytes], *, revision: str = "main", commit: str = COMMIT) -> None:
        """Make these files the content of a revision."""
        self.revisions[repo, revision] = self.revisions[repo, commit] = commit
        self.files[repo, commit] = files

    def ranges(self, name: str) -> list[str | None]:
        """The ranges that the storage was asked for."""
        return [one.range for one in self.asked if one.name == name and one.at_storage]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: StubHub, is_storage: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.is_storage = hub, is_storage
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, *_: object) -> None: ...  # a client that has enough closes its connection


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.split("/")[1:]]
        if self.server.is_storage:
            self._content("/".join(parts[:2]), parts[2], "/".join(parts[3:]))
        elif parts[:2] == ["api", "models"]:
            self._listing("/".join(parts[2:4]), parts[5] if len(parts) > 4 else "main")
        else:
            self._content("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _listing(self, repo: str, revision: str) -> None:
        hub = self.server.hub
        hub.listings.append(self.headers.get("Authorization"))
        if hub.refusal is not None:
            return self._refuse(hub.refusal)
        if not any(one == repo for one, _ in hub.revisions):
            return self._refuse(Refused(401, "RepoNotFound"))
        if (repo, revision) not in hub.revisions:
            return self._refuse(Refused(404, "RevisionNotFound"))
        commit = hub.revisions[repo, revision]
        siblings = [_described(name, content) for name, content in hub.files[repo, commit].items()]
        self._send(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode())

    def _content(self, repo: str, commit: str, name: str) -> None:
        hub, wanted = self.server.hub, self.headers.get("Range")
        hub.asked.append(Asked(name, self.server.is_storage, wanted, self.headers.get("Authorization")))
        content = hub.files[repo, commit][name]
        if len(content) >= LFS_BYTES and not self.server.is_storage:
            return self._send(302, b"", {"Location": f"{hub.storage_url}/{repo}/{commit}/{urllib.parse.quote(name)}"})
        fault = hub.faults[name].popleft() if hub.faults[name] else None
        if isinstance(fault, Refused):
            return self._refuse(fault)
        start = 0
        headers = {}
        if wanted is not None and not isinstance(fault, Whole):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if isinstance(fault, Changed):
            body = bytes([body[0] ^ 1]) + body[1:]
        end = fault.after if isinstance(fault, Cut | Stalled) else None
        self._send(206 if headers else 200, body, headers, end)
        if isinstance(fault, Stalled):
            self.wfile.flush()
            fault.is_stalled.set()
            self.connection.recv(1)  # returns when the client is gone

    def _refuse(self, refused: Refused) -> None:
        code = {"X-Error-Code": refused.code} if refused.code else {}
        self._send(refused.status, b'{"error": "no"}', {**code, **refused.headers})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, end: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:end])
        if end is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None: ...


def _described(name: str, content: bytes) -> dict[str, object]:
    described: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_digest(content)}
    if len(content) >= LFS_BYTES:
        sha256 = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
    return described


def git_digest(content: bytes) -> str:
    """The name that git gives to a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
