"""Requests whose replica dies, with replicas that are only pretended: they say what the test has them say."""

from __future__ import annotations

from typing import Any

import pytest

from headway.front.engine_client import MAX_TRIALS, TOO_MANY_DEATHS, EngineClient
from headway.front.supervision import Replica
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest, Delta, EngineReady, StepBatch
from tests.unit.front.served import read

READY = EngineReady("m", 100, 50, 10, 4, 8, 64, "cpu", "float32")


def pretended(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[EngineClient, list[list[Any]]]:
    """A client, and what each of its replicas has been sent."""
    monkeypatch.setattr(Replica, "is_ready", True)
    client = EngineClient(router="round-robin", **options)
    sent: list[list[Any]] = [[] for _ in client.replicas]
    for replica, own in zip(client.replicas, sent, strict=True):
        replica.info, replica.send = READY, own.append  # type: ignore[method-assign]
        client.note_ready(replica)
    return client, sent


def tell(client: EngineClient, place: int, token_id: int, *, is_last: bool = False) -> None:
    delta = Delta("r", token_ids=[token_id], is_last=is_last, finish_reason="length" if is_last else None)
    client.take(client.replicas[place], StepBatch([delta], EngineStats()))


def request() -> AddRequest:
    return AddRequest("r", [1, 2, 3], SamplingParams(max_tokens=40))


async def test_what_comes_late_from_a_replica_that_is_gone_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    client, sent = pretended(monkeypatch, num_replicas=2)
    stream = client.submit(request())
    tell(client, 0, 7)
    client.note_loss(client.replicas[0])
    assert sent[1][-1].told[0].token_ids == [7]
    tell(client, 0, 8)
    tell(client, 1, 8)
    tell(client, 1, 9, is_last=True)
    assert [token for deltas in [await anext(stream)] for delta in deltas for token in delta.token_ids] == [7, 8, 9]
    assert client.num_open_streams == 0 and client.num_resumed == 1


async def test_deaths_before_a_request_got_its_last_token_are_not_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = pretended(monkeypatch, num_replicas=1)
    stream = client.submit(request())
    for token_id in range(3 * MAX_TRIALS):
        tell(client, 0, token_id)
        client.note_loss(client.replicas[0])
        client.note_ready(client.replicas[0])
    assert client.num_open_streams == 1 and client.num_resumed == 3 * MAX_TRIALS
    for _ in range(2 * MAX_TRIALS):  # without a token in between it is
        client.note_loss(client.replicas[0])
        client.note_ready(client.replicas[0])
    assert client.num_open_streams == 0
    last = (await read(stream))[-1]
    assert (last.error, last.error_status) == (TOO_MANY_DEATHS, 503)
