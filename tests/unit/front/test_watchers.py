"""Viewers of steps, with replicas that only note what they are sent. Followers of caches: see `test_cache_stream`."""

from __future__ import annotations

from typing import Any

from headway.front.watch_streams import SnapshotStream
from headway.front.watchers import SnapshotViewers
from headway.wire.messages import BlockMap, BlockSnapshot, Watch


class Replica:
    """Notes whether it was told to make snapshots."""

    info = None
    epoch = 0

    def __init__(self, place: int) -> None:
        self.place = place
        self.told: list[bool] = []

    def send(self, message: Any) -> None:
        assert isinstance(message, Watch)
        self.told.append(message.on)


SNAPSHOTS = [BlockSnapshot(BlockMap([name], [])) for name in "abc"]


async def seen(viewer: SnapshotStream) -> list[BlockSnapshot]:
    """What comes before its end; it is closed already, or has been read up to now."""
    return [snapshot async for snapshot in viewer]


async def test_a_replica_makes_snapshots_while_somebody_looks() -> None:
    first, second = replicas = [Replica(0), Replica(1)]
    viewers = SnapshotViewers(replicas)
    one, other = viewers.watch(1), viewers.watch(1)
    assert second.told == [True, True], "the second wants to know the blocks as they are"
    viewers.push(0, SNAPSHOTS[0])
    viewers.push(1, SNAPSHOTS[1])
    assert await anext(one) is SNAPSHOTS[1] and await anext(other) is SNAPSHOTS[1]
    one.close()
    one.close()
    viewers.push(1, SNAPSHOTS[2])
    assert await seen(one) == [] and await anext(other) is SNAPSHOTS[2]
    assert second.told == [True, True]
    viewers.note_ready(0)
    viewers.note_ready(1)
    assert second.told == [True, True, True], "its next process is told, too"
    other.close()
    viewers.note_ready(1)
    assert second.told == [True, True, True, False] and not first.told


async def test_at_the_end_all_streams_end() -> None:
    viewers = SnapshotViewers([Replica(0), Replica(1)])
    streams = [viewers.watch(place) for place in (0, 1, 1)]
    viewers.close()
    assert [await seen(stream) for stream in streams] == [[]] * 3
