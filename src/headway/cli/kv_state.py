"""The KV cache of a running server, read from its /live stream: counts, rates, owners of blocks. No drawing here."""

from __future__ import annotations

import enum
import http.client
import json
import ssl
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from headway.errors import ConfigError, HeadwayError
from headway.server.live.batch_frames import CACHED, FREE, SHARED


class Holder(enum.Enum):
    """What holds a block."""

    FREE = "free"
    CACHED = "cached"
    SHARED = "shared"
    ONE = "one request"


@dataclass(frozen=True)
class Run:
    """Neighbouring cells of the map with the same holder."""

    holder: Holder
    request: int
    """The number of the request, if the holder is `Holder.ONE`."""
    num_cells: int


@dataclass(frozen=True)
class BlockCells:
    """The map of the cache. In large caches a cell stands for several blocks."""

    runs: tuple[Run, ...]
    blocks_per_cell: int


@dataclass(frozen=True)
class KVState:
    """The state of the cache at one moment."""

    model: str
    block_size: int
    num_blocks: int
    num_live_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_host_blocks: int
    num_host_slots: int
    """The number of blocks that fit in host memory; 0: there is no host tier."""
    num_moved_out_blocks: int
    num_moved_in_blocks: int
    num_used_slots: int
    num_table_entries: int
    num_running: int
    num_waiting: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_saved_tokens: int
    num_inserted_blocks: int
    num_evicted_blocks: int
    num_preemptions: int
    num_recomputed_tokens: int
    recent_hit_rate: float | None
    """The prefix cache's hit rate over the last minute; None if nothing was looked up."""
    cells: BlockCells | None
    """None if the server has not sent the map yet."""
    is_caching: bool = True

    @property
    def hit_rate(self) -> float | None:
        """The prefix cache's hit rate since the server's start."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else None

    @property
    def waste(self) -> float:
        """Share of the slots in live blocks that hold no token."""
        num_slots = self.num_live_blocks * self.block_size
        return 1 - self.num_used_slots / num_slots if num_slots else 0.0

    @property
    def sharing_factor(self) -> float:
        """How many requests hold a live block, on average."""
        return self.num_table_entries / self.num_live_blocks if self.num_live_blocks else 1.0

    @property
    def host_text(self) -> str:
        """Text about the blocks in host memory, and those copied there and back."""
        moves = f"{self.num_moved_out_blocks:,} moved out, {self.num_moved_in_blocks:,} back"
        return f"{self.num_host_blocks:,} of {self.num_host_slots:,} blocks in host memory · {moves}"


def states(events: Iterator[LiveEvent]) -> Iterator[KVState]:
    """Yields one state per frame. Frames include the map only when it has changed."""
    info: dict[str, Any] | None = None
    cells: BlockCells | None = None
    for name, data in events:
        if name == "hello":
            info, cells = data, None
        elif name == "frame" and info is not None:
            cells = _cells(data["blocks"]) if data["blocks"] is not None else cells
            yield _state(info, data["numbers"], cells)


def _state(info: dict[str, Any], numbers: dict[str, Any], cells: BlockCells | None) -> KVState:
    num_held = numbers["num_used_blocks"] + numbers["num_cached_blocks"]
    return KVState(
        model=info["model"].rstrip("/").rpartition("/")[2],
        block_size=info["block_size"],
        num_blocks=info["num_blocks"],
        num_live_blocks=numbers["num_used_blocks"],
        num_cached_blocks=numbers["num_cached_blocks"],
        num_free_blocks=info["num_blocks"] - num_held,
        num_host_blocks=numbers["num_host_blocks"],
        num_host_slots=info["num_host_slots"],
        num_moved_out_blocks=numbers["num_moved_out_blocks"],
        num_moved_in_blocks=numbers["num_moved_in_blocks"],
        num_used_slots=numbers["num_used_slots"],
        num_table_entries=numbers["num_table_entries"],
        num_running=numbers["num_running"],
        num_waiting=numbers["num_waiting"],
        num_queried_tokens=numbers["num_queried_tokens"],
        num_hit_tokens=numbers["num_hit_tokens"],
        num_saved_tokens=numbers["num_saved_tokens"],
        num_inserted_blocks=numbers["num_inserted_blocks"],
        num_evicted_blocks=numbers["num_evicted_blocks"],
        num_preemptions=numbers["num_preemptions"],
        num_recomputed_tokens=numbers["num_recomputed_tokens"],
        recent_hit_rate=numbers["hit_rate"],
        cells=cells,
        is_caching=info["prefix_caching"],
    )


def _cells(blocks: dict[str, Any]) -> BlockCells:
    pairs = zip(blocks["runs"][::2], blocks["runs"][1::2])
    return BlockCells(tuple(_run(owner, num_cells) for owner, num_cells in pairs), blocks["blocks_per_cell"])


def _run(owner: int, num_cells: int) -> Run:
    holder = {FREE: Holder.FREE, CACHED: Holder.CACHED, SHARED: Holder.SHARED}.get(owner, Holder.ONE)
    return Run(holder, max(owner, 0), num_cells)


TIMEOUT_S = 10.0
"""How long to wait for an event. A healthy server sends one every second."""


class ServerUnreachableError(HeadwayError):
    """There is no server, or not one that answers."""


class LiveEvent(NamedTuple):
    """One event: "hello" describes the engine, "frame" gives its current state."""

    name: str
    data: dict[str, Any]


def live_events(url: str, api_key: str | None) -> Generator[LiveEvent, None, None]:
    """Yields events until the server ends the stream or the generator is closed. Raises `ServerUnreachableError`, which
    says what is wrong and what to do about it."""
    address = _address(url)
    connection = _connect(address)
    try:
        yield from _events(_request(connection, address, api_key), url)
    except ssl.SSLError as error:
        raise ServerUnreachableError(f"No TLS connection with {url}: {error.reason or error}.") from error
    except TimeoutError as error:
        raise ServerUnreachableError(f"The server at {url} has said nothing for {TIMEOUT_S:g} s.") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnreachableError(
            f"No server answers at {url} ({error}). Start one with 'headway serve', or name another with --url."
        ) from error
    finally:
        connection.close()


def _address(url: str) -> SplitResult:
    address = urlsplit(url)
    try:
        is_good = address.scheme in ("http", "https") and bool(address.hostname) and (address.port or 80) > 0
    except ValueError:  # a port that is none
        is_good = False
    if not is_good:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000, not '{url}'.")
    return address


def _connect(address: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    assert address.hostname is not None
    return kind(address.hostname, address.port, timeout=TIMEOUT_S)


def _request(
    connection: http.client.HTTPConnection, address: SplitResult, api_key: str | None
) -> http.client.HTTPResponse:
    headers = {"accept": "text/event-stream"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        connection.request("GET", f"{address.path.rstrip('/')}/live", headers=headers)
    except (ValueError, UnicodeEncodeError) as error:
        raise ConfigError("The API key cannot be sent: it has characters that no header may have.") from error
    return connection.getresponse()


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[LiveEvent]:
    if response.status == 401:
        raise ServerUnreachableError(
            f"The server at {url} asks for an API key that it knows: give one with --api-key or $HEADWAY_API_KEY."
        )
    if response.status != 200 or "event-stream" not in (response.getheader("content-type") or ""):
        raise ServerUnreachableError(f"What answers at {url} is not a Headway server (status {response.status}).")
    name = ""
    for line in response:
        field, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield LiveEvent(name, json.loads(value))
