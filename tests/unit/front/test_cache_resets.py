"""Resets of the caches of several replicas: who is asked, and what is made of the answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.core.kv.manager import CacheReset
from headway.errors import EngineUnavailableError
from headway.front.cache_resets import CacheResets
from headway.wire.messages import CacheResetDone, ResetCache


class PretendedReplica:
    def __init__(self, place: int, *, is_ready: bool = True) -> None:
        self.place = place
        self.is_ready = is_ready
        self.sent: list[ResetCache] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


async def begun(*replicas: PretendedReplica, with_disk: bool = False) -> tuple[CacheResets, asyncio.Task[CacheReset]]:
    resets = CacheResets(replicas)  # type: ignore[arg-type]
    task = asyncio.create_task(resets.reset(with_disk=with_disk))
    await asyncio.sleep(0)
    return resets, task


async def test_all_that_run_are_asked_and_their_blocks_are_summed_up() -> None:
    replicas = [PretendedReplica(0), PretendedReplica(1, is_ready=False), PretendedReplica(2)]
    resets, task = await begun(*replicas, with_disk=True)
    assert not replicas[1].sent and replicas[0].sent == replicas[2].sent
    (message,) = replicas[0].sent
    assert message.with_disk
    resets.receive(0, CacheResetDone("of another front end", 100, 100))
    resets.receive(1, CacheResetDone(message.name, 100, 100))  # it was not asked
    resets.receive(0, CacheResetDone(message.name, 3, 1))
    resets.receive(0, CacheResetDone(message.name, 100, 100))  # once is enough
    await asyncio.sleep(0)
    assert not task.done()
    resets.receive(2, CacheResetDone(message.name, 4, 0))
    assert await task == CacheReset(7, 1)
    resets.receive(2, CacheResetDone(message.name, 4, 0))


async def test_a_process_that_dies_has_forgotten_everything() -> None:
    replicas = [PretendedReplica(0), PretendedReplica(1)]
    resets, task = await begun(*replicas)
    resets.note_loss(1)
    resets.receive(0, CacheResetDone(replicas[0].sent[0].name, 3, 1))
    assert await task == CacheReset(3, 1)


async def test_two_at_once_do_not_mix() -> None:
    replica = PretendedReplica(0)
    resets = CacheResets([replica])  # type: ignore[list-item]
    tasks = [asyncio.create_task(resets.reset(with_disk=False)) for _ in range(2)]
    await asyncio.sleep(0)
    for number, message in reversed(list(enumerate(replica.sent))):
        resets.receive(0, CacheResetDone(message.name, number, 0))
    assert [outcome.num_forgotten for outcome in await asyncio.gather(*tasks)] == [0, 1]


async def test_without_a_replica_or_an_answer_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, task = await begun(PretendedReplica(0, is_ready=False))
    with pytest.raises(EngineUnavailableError, match="no engine"):
        await task
    monkeypatch.setattr(CacheResets, "LONGEST_S", 0.001)
    _, task = await begun(PretendedReplica(0))
    with pytest.raises(EngineUnavailableError, match="not reset its cache within"):
        await task
