"""The client's half of HTTP/1.1, as bytes in and bytes out: how a response is framed, and where events end.

No sockets here, so that every way in which bytes can be cut apart is easily tried. It is small because it knows only
what a load generator meets: one response after another on a connection, with a length, in chunks, or until its end.
"""

from __future__ import annotations

MAX_HEAD_BYTES = 65_536
_BLANK_LINE = b"\r\n\r\n"


class BadResponseError(Exception):
    """What came is not HTTP."""


class ResponseParser:
    """One response. `feed` it whatever arrives; it gives back what of it is body."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = bytearray()
        self._chunks: _ChunkDecoder | None = None
        self._num_left: int | None = None
        """Bytes of the body that have not come, where its length is known."""

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can carry another exchange after this one."""
        is_framed = self._chunks is not None or self._num_left is not None
        return self.is_complete and is_framed and self.headers.get("connection", "").lower() != "close"

    @property
    def has_begun(self) -> bool:
        """Whether any byte of it has come."""
        return bool(self.status or self._buffer)

    def feed(self, data: bytes) -> bytes:
        """`BadResponseError` for what no HTTP server says."""
        if self.status:
            return self._body(data)
        self._buffer += data
        end = self._buffer.find(_BLANK_LINE)
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadResponseError("its head has no end")
            return b""
        head, rest = bytes(self._buffer[:end]), bytes(self._buffer[end + len(_BLANK_LINE) :])
        self._buffer.clear()
        self._read_head(head)
        if self.status < 200:  # "continue", and others that only announce a response
            self.status = 0
            self.headers.clear()
            return self.feed(rest)
        return self._body(rest)

    def end(self) -> bool:
        """The connection has ended. Whether the response is whole."""
        if self.status and self._chunks is None and self._num_left is None:
            self.is_complete = True
        return self.is_complete

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise BadResponseError(f"it begins with {first[:40]!r}")
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._chunks = _ChunkDecoder()
        elif self.status in (204, 304):
            self._num_left = 0
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdigit():
                raise BadResponseError(f"its length is {length[:40]!r}")
            self._num_left = int(length)

    def _body(self, data: bytes) -> bytes:
        if self._chunks is not None:
            body = self._chunks.feed(data)
            self.is_complete = self._chunks.is_complete
            return body
        if self._num_left is not None:
            data = data[: self._num_left]
            self._num_left -= len(data)
            self.is_complete = self._num_left == 0
        return data


class _ChunkDecoder:
    """A body in chunks: each is its length in hexadecimal, a line end, so many bytes, a line end; one of length 0 ends
    it, after which trailers may come."""

    def __init__(self) -> None:
        self.is_complete = False
        self._buffer = b""
        self._in_trailers = False

    def feed(self, data: bytes) -> bytes:
        data = self._buffer + data if self._buffer else data
        pieces, place = [], 0
        while not self.is_complete:
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                break
            if self._in_trailers:
                self.is_complete = line_end == place
                place = line_end + 2
                continue
            size = _chunk_size(data[place:line_end])
            if size == 0:
                self._in_trailers, place = True, line_end + 2
                continue
            start = line_end + 2
            if len(data) < start + size + 2:
                break
            pieces.append(data[start : start + size])
            place = start + size + 2
        self._buffer = data[place:]
        return b"".join(pieces)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadResponseError(f"a chunk's length is {line[:40]!r}") from None


class EventParser:
    """Server-sent events: gives the data of each one whose blank line has come."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """The events that are whole now."""
        events = []
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].lstrip(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
