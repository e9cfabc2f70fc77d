"""A connection without a socket: what a client sends is handed to the protocol, what it would read is kept."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.server.http.connection import BoundedProtocol


class FakeTransport(asyncio.Transport):
    """The server's end of a connection whose client reads everything at once."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__({"sockname": ("127.0.0.1", 8000), "peername": ("127.0.0.1", 50000)})
        self.written = bytearray()
        self._protocol = protocol
        self._is_closing = False
        protocol.connection_made(self)

    def feed(self, data: bytes) -> None:
        """The client sends something, unless the server has closed the connection."""
        if not self._is_closing:
            self._protocol.data_received(data)

    def leave(self) -> None:
        """The client closes its end."""
        self.close()

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self.written += data

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0
