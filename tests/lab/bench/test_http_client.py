"""Responses and events, cut apart in every way that a network may cut them."""

from __future__ import annotations

import pytest

from headway_lab.bench.http_client import BadResponseError, EventParser, ResponseParser

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\nhello \r\n5;name=x\r\nworld\r\n0\r\nTrailer: yes\r\n\r\n"
)
MEASURED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 11\r\n\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + MEASURED
UNTIL_THE_END = b"HTTP/1.0 200 OK\r\n\r\nhello world"


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize(("response", "status"), [(CHUNKED, 200), (MEASURED, 404), (CONTINUED, 404)])
def test_the_same_body_however_it_is_cut(response: bytes, status: int, size: int) -> None:
    parser = ResponseParser()
    body = b"".join(parser.feed(response[place : place + size]) for place in range(0, len(response), size))
    assert (parser.status, body, parser.is_complete, parser.keeps_alive) == (status, b"hello world", True, True)


def test_a_body_without_a_length_goes_to_the_end_of_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(UNTIL_THE_END) == b"hello world"
    assert not parser.is_complete
    assert parser.end() and not parser.keeps_alive
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    parser.feed(b"")
    assert parser.is_complete and not parser.keeps_alive


@pytest.mark.parametrize("cut", [len(CHUNKED) - 2, len(CHUNKED) - 20, 30, 0])
def test_a_chunked_body_that_breaks_off_is_not_whole(cut: int) -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED[:cut])
    assert not parser.end()
    assert parser.has_begun == (cut > 0)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "it begins with 'SSH"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", "its length is 'many'"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", "a chunk's length is b'xyz'"),
        (b"x" * 70_000, "no end"),
    ],
)
def test_what_no_server_says(response: bytes, reason: str) -> None:
    with pytest.raises(BadResponseError, match=reason):
        ResponseParser().feed(response)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events(size: int, end: bytes) -> None:
    text = b": a comment|event: x|data: one|||data:two|data: more|id: 3||data: no"
    stream = text.replace(b"|", end)
    parser = EventParser()
    events = [e for place in range(0, len(stream), size) for e in parser.feed(stream[place : place + size])]
    assert events == [b"one", b"two\nmore"]
