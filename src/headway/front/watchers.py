"""Serves viewers of a replica's steps and followers of all prefix caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headway.core.kv.cache_report import CacheReport
from headway.front.cache_index import CacheIndex
from headway.front.kv_event_format import EventBatch, KVEventFeed
from headway.front.watch_streams import CacheEvent, CacheStream, SnapshotStream, present_state
from headway.wire.messages import CacheNews, EngineReady, ReportCache, Snapshot, Watch


class WatchedReplica(Protocol):
    """The part of a replica that is used here."""

    place: int
    epoch: int
    """A number that grows with each new process."""
    info: EngineReady | None

    def send(self, message: Any) -> None:
        """Send it a message, unless it is gone."""


class SnapshotViewers:
    """The viewers of all replicas. A replica makes snapshots only while it has a viewer."""

    def __init__(self, replicas: Sequence[WatchedReplica]) -> None:
        self._replicas = replicas
        self._viewers: list[list[SnapshotStream]] = [[] for _ in replicas]

    def watch(self, place: int) -> SnapshotStream:
        """Return a stream of a replica's present blocks and then of all its steps, until the stream is closed."""
        viewer = SnapshotStream(functools.partial(self._leave, place))
        self._viewers[place].append(viewer)
        self._send_watch(place)
        return viewer

    def push(self, place: int, snapshot: Snapshot) -> None:
        """Give a replica's snapshot to its viewers."""
        for viewer in self._viewers[place]:
            viewer.push(snapshot)

    def note_ready(self, place: int) -> None:
        """Tell a replica's new process that it is watched, if it is."""
        if self._viewers[place]:
            self._send_watch(place)

    def close(self) -> None:
        """End all streams."""
        for viewers in self._viewers:
            for viewer in viewers.copy():
                viewer.close()

    def _leave(self, place: int, viewer: SnapshotStream) -> None:
        self._viewers[place].remove(viewer)
        if not self._viewers[place]:
            self._send_watch(place)

    def _send_watch(self, place: int) -> None:
        self._replicas[place].send(Watch(on=bool(self._viewers[place])))


class CacheFollowers:
    """Applies reports of prefix caches to the routers' indexes and passes them on to followers and to gateways."""

    def __init__(self, replicas: Sequence[WatchedReplica], indexes: Sequence[CacheIndex]) -> None:
        """`indexes`: for each replica, the index that covers its cache."""
        self._replicas = replicas
        self._indexes = indexes
        self._followers: list[CacheStream] = []
        self._feed: KVEventFeed | None = None
        self._is_closed = False

    def publish(self, offer: Callable[[EventBatch], bool]) -> None:
        """Hand all changes to `offer`, which returns whether it has taken them. Must be called before a replica is
        started."""
        self._feed = KVEventFeed(
            len(self._replicas),
            block_size=lambda place: _block_size(self._replicas[place]),
            offer=offer,
            ask_again=lambda place: self._replicas[place].send(ReportCache()),
        )

    def follow(self) -> CacheStream:
        """Return a stream of each cache's content and then of every change, until the stream is closed."""
        follower = CacheStream(len(self._replicas), self._present, self._followers.remove)
        self._followers.append(follower)
        if self._is_closed:
            follower.close()
        return follower

    def receive(self, place: int, news: CacheNews) -> None:
        """Apply a replica's report. If an earlier one was lost, ask the replica to report its whole cache."""
        replica = self._replicas[place]
        report = CacheReport(news.number, news.stored, news.evicted, news.is_whole, news.contents)
        is_known = self._indexes[place].apply(place, report)
        if not is_known:
            replica.send(ReportCache())
        if not is_known or report.is_whole:
            self.start_anew(place)
        if is_known and self._feed is not None:
            self._feed.take(place, report)
        if not is_known or report.is_whole:
            return
        for follower in self._followers:
            follower.push(
                CacheEvent(
                    place, replica.epoch, report.number, _block_size(replica), False, report.stored, report.evicted
                )
            )

    def start_anew(self, place: int) -> None:
        """Tell all that a cache's previous state is no longer valid."""
        if self._feed is not None:
            self._feed.clear(place)
        for follower in self._followers:
            follower.start_anew(place)

    def close(self) -> None:
        """End all streams. Streams opened later end at once."""
        self._is_closed = True
        for follower in self._followers.copy():
            follower.close()

    def _present(self, place: int) -> list[CacheEvent]:
        index, replica = self._indexes[place], self._replicas[place]
        return present_state(
            index.blocks_of(place),
            place=place,
            epoch=replica.epoch,
            number=index.last_number(place),
            block_size=_block_size(replica),
        )


def _block_size(replica: WatchedReplica) -> int:
    return 0 if replica.info is None else replica.info.block_size
