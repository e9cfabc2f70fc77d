"""Prompts that prefill replicas compute: who gets them, how they end, and what stays."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headway.core.request_options import RequestOptions
from headway.errors import InvalidRequestError
from headway.front import prefills
from headway.front.dispatch import Dispatch
from headway.front.prefills import LEAST_PREFILL_S, MOST_PREFILL_S, SLOW_PREFILL, Prefills
from headway.front.roles import PrefillChoice, Roles
from headway.front.router import Router
from headway.sampling_params import SamplingParams
from headway.wire.messages import AddRequest, Delta
from tests.unit.clock import Clock
from tests.unit.front.fake_engines import FakeEngines, FakeReplica, serving
from tests.unit.front.served import expected, read, until
from tests.unit.front.virtual_time import runner  # noqa: F401

PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture(autouse=True)
def choices(monkeypatch: pytest.MonkeyPatch) -> list[PrefillChoice]:
    """All prompts go to a prefill replica; what the decisions would have been made by."""
    made: list[PrefillChoice] = []

    def note(choice: PrefillChoice) -> bool:
        made.append(choice)
        return True

    monkeypatch.setattr(prefills, "computes_elsewhere", note)
    return made


class Apart:
    """Replicas that answer and others that compute prompts; blocks have four tokens."""

    def __init__(self, num_decode: int = 1, num_prefill: int = 1) -> None:
        self.clock = Clock()
        self.decode = [FakeReplica(place) for place in range(num_decode)]
        places = range(num_decode, num_decode + num_prefill)
        self.prefill = [FakeReplica(place, blocks_at=f"tcp://p{place}:1") for place in places]
        self.router, own = (Router("least-loaded", block_size=4, counts_uncached=True) for _ in range(2))
        self.prefills = Prefills(self.prefill, router=own, answering=self.router, now=self.clock)
        self.dispatch = Dispatch(self.decode, router=self.router, prefills=self.prefills)
        for router, replicas in (self.router, self.decode), (own, self.prefill):
            for replica in replicas:
                router.add(replica.place, max_num_seqs=8)

    def send(self, name: str, num_tokens: int = 41, params: SamplingParams = PARAMS) -> AddRequest:
        """Returns what the replica that answers has got."""
        prompt = [ord(name[0]) + number % 3 for number in range(num_tokens)]
        options = RequestOptions(blocks_at="tcp://10.0.0.1:22", cache_salt="mine")
        replica = self.dispatch.send(AddRequest(name, prompt, params, options))
        assert isinstance(replica, FakeReplica)
        return replica.added[-1]

    def compute(self, replica: FakeReplica, **end: Any) -> None:
        """Its oldest prompt has been computed."""
        self.prefills.deliver([Delta(replica.added.pop(0).request_id, token_ids=[5], is_last=True, **end)])

    @property
    def outcomes(self) -> dict[str, int]:
        """Without those of which there are none."""
        return {name: number for name, number in self.prefills.outcomes.items() if number}


def test_both_get_it_at_once_and_one_knows_where_blocks_come_from(choices: list[PrefillChoice]) -> None:
    apart = Apart()
    sent = apart.send("long")
    ((asked,), (here,)) = apart.prefill[0].added, apart.decode
    assert sent.options.blocks_at == f"tcp://p1:1#{asked.request_id}"
    assert sent.prompt_token_ids[:40] == asked.prompt_token_ids, "whole blocks only"
    assert asked.params is not None and asked.params.max_tokens == 1 and asked.options.cache_salt == "mine"
    assert asked.options.blocks_at == ""
    assert choices[0].num_uncached == 41 and choices[0].num_blocks == 10 and choices[0].num_generating == 0
    assert apart.router.num_uncached("long") == 1, "the last token is computed where the answer is"
    assert apart.prefills.num_live == 1 and not apart.outcomes
    apart.compute(apart.prefill[0])
    assert apart.outcomes == {"elsewhere": 1} and not apart.prefills.num_live and not apart.prefill[0].aborted
    apart.dispatch.end("long")
    assert apart.outcomes == {"elsewhere": 1} and here.added == [sent]


@pytest.mark.parametrize(
    "asked",
    [{"num_tokens": 4}, {"params": SamplingParams(prompt_logprobs=1)}, {"params": SamplingParams.for_embedding()}],
    ids=["without a whole block", "of every prompt token", "a vector"],
)
def test_what_is_computed_where_it_is_answered(asked: dict[str, Any], choices: list[PrefillChoice]) -> None:
    apart = Apart()
    assert apart.send("short", **asked).options.blocks_at == "", "and what a client says of it does not count"
    assert apart.outcomes == {"here": 1} and not choices and not apart.prefill[0].added


def test_what_is_not_worth_it_leaves_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "computes_elsewhere", lambda choice: False)
    apart = Apart()
    assert apart.send("long").options.blocks_at == ""
    assert apart.outcomes == {"here": 1} and not apart.prefill[0].added
    assert apart.prefills.router.num_tokens(1) == 0 and apart.router.num_uncached("long") == 41


def test_without_a_healthy_prefill_replica_prompts_are_computed_where_they_are_answered() -> None:
    apart = Apart()
    apart.prefills.router.suspend(1, True)
    assert apart.send("a").options.blocks_at == ""
    apart.prefills.router.suspend(1, False)
    assert apart.send("b").options.blocks_at
    assert apart.outcomes == {"here": 1}


def test_without_prefill_replicas_nothing_is_counted() -> None:
    apart = Apart(num_prefill=0)
    assert apart.send("a").options.blocks_at == "" and apart.prefills.outcomes == {}
    assert not apart.dispatch.counts and Apart().dispatch.counts and Apart(2, 0).dispatch.counts


def test_each_prompt_goes_to_the_prefill_replica_with_the_least_to_do() -> None:
    apart = Apart(num_prefill=2)
    for name in "abcdef":
        apart.send(name)
    assert [len(replica.added) for replica in apart.prefill] == [3, 3]


def test_an_aborted_request_is_aborted_there_too() -> None:
    apart = Apart()
    apart.send("a")
    asked = apart.prefill[0].added[0].request_id
    apart.dispatch.end("a", "aborted")
    assert apart.prefill[0].aborted == [asked] and apart.outcomes == {"aborted": 1}
    apart.compute(apart.prefill[0])  # that was on its way
    assert apart.outcomes == {"aborted": 1}


def test_a_request_that_cannot_be_sent_leaves_nothing() -> None:
    apart = Apart()
    with pytest.raises(InvalidRequestError):
        apart.send("unsendable")
    assert apart.outcomes == {"failed": 1} and not apart.prefills.num_live
    assert apart.prefills.router.num_tokens(1) == apart.router.num_tokens(0) == 0


def test_a_prompt_that_fails_there() -> None:
    apart = Apart()
    apart.send("a")
    apart.compute(apart.prefill[0], error="it failed")
    assert apart.outcomes == {"failed": 1}


@pytest.mark.parametrize(
    ("token_s", "limit_s"),
    [(0.0, MOST_PREFILL_S), (1e-4, LEAST_PREFILL_S), (0.1, SLOW_PREFILL * 0.1 * 400), (9.0, MOST_PREFILL_S)],
    ids=["nothing is known", "a short one", "a long one", "a very long one"],
)
def test_a_prompt_is_not_waited_for_for_ever(token_s: float, limit_s: float) -> None:
    apart = Apart()
    apart.prefill[0].stats.step.prompt_token_s = token_s
    apart.send("a", num_tokens=401)
    apart.clock.now_s += min(limit_s, MOST_PREFILL_S) - 0.01
    apart.prefills.end_late()
    assert not apart.outcomes
    apart.clock.now_s += 0.02
    apart.prefills.end_late()
    assert apart.outcomes == {"failed": 1} and len(apart.prefill[0].aborted) == 1


def test_a_request_that_moves_takes_its_prompt_along() -> None:
    apart = Apart(num_decode=2)
    first = apart.send("a")
    apart.dispatch.withdraw("a")
    again = apart.dispatch.send(first)
    assert again.added[-1].options.blocks_at == first.options.blocks_at
    assert len(apart.prefill[0].added) == 1, "it is asked once"


def test_a_prefill_replica_that_dies_is_not_named_again() -> None:
    apart = Apart(num_decode=2)
    first, other = apart.send("a"), apart.send("b")
    apart.compute(apart.prefill[0])
    apart.prefills.note_loss(apart.prefill[0])
    assert apart.outcomes == {"elsewhere": 1, "failed": 1} and not apart.prefill[0].aborted
    for request in (first, other):
        apart.dispatch.withdraw(request.request_id)
        assert apart.dispatch.send(request).added[-1].options.blocks_at == ""
        apart.dispatch.end(request.request_id)
    assert apart.outcomes == {"elsewhere": 1, "failed": 1}
    assert apart.send("c").options.blocks_at, "its next process gets prompts again"


# ---- all of the front end -------------------------------------------------------------------------------------------


async def answer(client: Any, name: str, num_tokens: int = 41, max_tokens: int = 8) -> str:
    request = AddRequest(name, [7] * num_tokens, SamplingParams(max_tokens=max_tokens))
    return "".join(delta.text for delta in await read(client.submit(request)))


async def test_tokens_come_from_the_one_whatever_happens_to_the_other() -> None:
    engines = FakeEngines()
    async with serving(engines, roles=Roles(num_prefill=1, num_decode=1)) as client:
        decode, prefill = client.replicas
        assert (decode.role, prefill.role) == ("decode", "prefill") and decode.answers and not prefill.answers
        whole = expected(8, num_prompt_tokens=41)
        assert await answer(client, "a") == whole
        assert client.prefill_outcomes["elsewhere"] == 1
        assert client.stats.batch.generation_tokens == 8, "the token of the prefill is nobody's"
        engines.kill(1)
        await until(lambda: not prefill.is_ready)
        assert client.health.ok and await answer(client, "b") == whole
        assert client.prefill_outcomes["here"] == 1, "it is not back yet"
        await until(lambda: prefill.is_ready)
        assert await answer(client, "c") == whole
        assert client.prefill_outcomes["elsewhere"] == 2
        engines.kill(0)
        await until(lambda: not client.health.ok)
        assert prefill.is_ready and await answer(client, "waits until it is back") == whole
        assert client.num_open_streams == 0


async def test_a_prefill_replica_that_hangs_is_left_behind_and_replaced() -> None:
    engines = FakeEngines()
    async with serving(engines, roles=Roles(1, 1)) as client:
        engine = engines.engines[1]
        engines.kill(1, signal.SIGSTOP)
        stream = client.submit(AddRequest("a", [7] * 41, SamplingParams(max_tokens=4000)))
        await until(lambda: client.prefill_outcomes["failed"] == 1)
        stream.close()
        await until(lambda: client.num_restarts == 1 and client.replicas[1].is_ready)
        assert engine.returncode is not None and client.health.ok
