"""Replicas with roles: times that can be computed by hand, no request lost or served twice whatever happens, and the
same as without roles where nothing is worth sending. Ranks: what they tell each other is part of a step."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from headway.config import CacheConfig, SchedulerConfig
from headway.core.step_work import StepWork
from headway.errors import ConfigError
from headway.front.roles import Roles
from headway.front.router import ROUTERS
from headway_lab.sim import CostModel, Machine, Simulation, simulate
from headway_lab.sim.cost_model import Link, Ranks
from headway_lab.sim.replica import Replica
from headway_lab.workload.bench_requests import BenchRequest

DEVICE = CostModel.of_terms(decode_constant=0.010, chunk_constant=0.010, tokens_over_0=5e-5)
"""10 ms to read the weights, in which 200 tokens of prompts could be computed."""
LINK = Link(gb_s=1.0, latency_s=0.001)
MACHINE = Machine(
    DEVICE, num_blocks=2000, block_size=4, max_model_len=4000, bytes_per_block=100_000, link=LINK
)  # 0.1 ms a block
CONFIG = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096, target_itl_ms=0.0).resolve("cpu")


def prompt(number: int, length: int) -> list[int]:
    """One that begins like no other."""
    return [number, *range(length - 1)]


def generating(number: int) -> list[BenchRequest]:
    """So many that answer for a second."""
    return [BenchRequest(prompt(n, 8), 100) for n in range(number)]


def run(work: list[BenchRequest], roles: Roles | None, machine: Machine = MACHINE, **others: Any) -> Simulation:
    options: dict[str, Any] = {"router": "prefix-aware", "seed": None, **others}
    num_replicas = 1 if roles is None else roles.num_replicas
    return simulate(work, machine, CONFIG, **{"num_replicas": num_replicas, **options}, roles=roles)


def test_times_of_a_prompt_that_is_computed_elsewhere() -> None:
    """One generates from 0 on, 10 ms a token; a prompt of 1,200 tokens comes at 105 ms: 70 ms of computing, 299 blocks
    that are asked for with the next step and take 30.9 ms, and the last 4 tokens in the first step after that."""
    work = [BenchRequest(prompt(1, 8), 60), BenchRequest(prompt(2, 1200), 3, arrival_s=0.105)]
    result = run(work, Roles(1, 1))
    (sent,) = result.transfers
    assert (sent.place, sent.num_blocks) == (0, 299)
    assert sent.asked_s == sent.from_s == pytest.approx(0.1804)  # 8 tokens of the first prompt took 0.4 ms
    assert sent.to_s == pytest.approx(0.1804 + 0.001 + 0.0299)
    first, second = result.timelines
    start_s = 0.2204
    assert second.token_times_s[0] == pytest.approx(start_s + 0.010 + 5 * 5e-5)
    assert second.arrival_s == 0.105
    assert max(first.itls_s) == pytest.approx(0.01025), "it hardly notices"
    alone = run(work, None)
    assert max(alone.timelines[0].itls_s) > 0.070
    assert result.num_routed == [2, 1] and result.num_prefill == 1
    assert result.hidden_share == pytest.approx(1.0)
    assert (result.num_queried_tokens, result.num_hit_tokens) == (1208, 0), "what was sent for was not found"


def test_a_transfer_while_the_other_replica_is_idle_is_not_hidden() -> None:
    """The one that generates ends before the blocks travel."""
    work = [BenchRequest(prompt(1, 8), 5), BenchRequest(prompt(2, 1200), 1, arrival_s=0.025)]
    result = run(work, Roles(1, 1))
    assert len(result.transfers) == 1 and result.hidden_share == 0.0
    assert result.timelines[1].ttft_s == pytest.approx(0.070 + 0.0309 + 0.0102)


def test_links_into_two_replicas_carry_at_once_but_one_link_does_not() -> None:
    """Two prompts are computed in one step; where they share a link, the second's blocks wait."""
    prompts = [BenchRequest(prompt(n, 800), 1, arrival_s=0.2) for n in (9, 10)]
    for roles, places in ((Roles(1, 1), {0}), (Roles(1, 2), {0, 1}), (Roles(2, 2), {0, 1})):
        work = [*generating(4 * roles.num_decode), *prompts]
        first, second = run(work, roles, router="round-robin").transfers
        assert {first.place, second.place} == places and first.asked_s == second.asked_s
        assert second.from_s == (first.from_s if roles.num_prefill == 2 else first.to_s)


def test_what_the_decode_replica_has_stays_there() -> None:
    """The second time nothing has to be computed but the end."""
    again = dataclasses.replace(BenchRequest(prompt(2, 1200), 3), arrival_s=1.0)
    work = [BenchRequest(prompt(1, 8), 200), BenchRequest(prompt(2, 1200), 3, arrival_s=0.1), again]
    for router in ROUTERS:
        result = run(work, Roles(1, 1), router=router)
        assert len(result.transfers) == 1
        assert result.timelines[2].ttft_s < 0.025


def test_only_blocks_that_are_missing_travel() -> None:
    """The next turn of a conversation: its beginning is where it was."""
    longer = [*prompt(2, 1200), *range(5000, 6600)]
    work = [
        BenchRequest(prompt(1, 8), 300),
        BenchRequest(prompt(2, 1200), 3, arrival_s=0.1),
        BenchRequest(longer, 3, after=1, think_s=0.5),
    ]
    result = run(work, Roles(1, 1))
    assert [sent.num_blocks for sent in result.transfers] == [299, (2800 - 1) // 4 - 300]
    assert result.num_hit_tokens == 1200, "the prefill replica had computed the beginning itself"


@pytest.mark.parametrize("roles", [Roles(1, 1), Roles(2, 3)])
def test_behind_a_link_that_is_too_slow_all_is_as_on_the_decode_replicas_alone(roles: Roles) -> None:
    rng = random.Random(1)
    work = [
        BenchRequest(prompt(n, rng.randint(4, 1500)), rng.randint(1, 30), arrival_s=0.05 * n + rng.random())
        for n in range(40)
    ]
    slow = dataclasses.replace(MACHINE, link=Link(gb_s=1e-3))
    apart = run(work, roles, slow)
    plain = run(work, None, num_replicas=roles.num_decode)
    assert not apart.transfers and apart.num_routed[roles.num_decode :] == [0] * roles.num_prefill
    assert [line.token_times_s for line in apart.timelines] == [line.token_times_s for line in plain.timelines]


@pytest.mark.parametrize(
    ("roles", "num_blocks", "seed", "router"),
    [
        (Roles(1, 1), 400, 1, "prefix-aware"),
        (Roles(1, 3), 400, 2, "round-robin"),
        (Roles(1, 3), 400, 4, "prefix-aware"),
        (Roles(3, 1), 700, 3, "least-loaded"),
    ],
)
def test_no_request_is_lost_or_served_twice(
    roles: Roles, num_blocks: int, seed: int, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so little memory that requests are preempted, blocks evicted, and slots of the host reused; with steps of
    any length; with shared beginnings, and turns that follow each other."""
    plain_step = Replica.step

    def checked_step(self: Replica) -> Any:
        step = plain_step(self)
        self.core.check_invariants()
        return step

    monkeypatch.setattr(Replica, "step", checked_step)
    rng = random.Random(seed)
    work: list[BenchRequest] = []
    for number in range(48):
        start = prompt(rng.randint(0, 5), rng.choice([0, 300, 700]) + 1)
        tokens = [*start, *prompt(100 + number, rng.randint(1, 700))]
        after = rng.randrange(number) if number and rng.random() < 0.3 else None
        work.append(BenchRequest(tokens, rng.randint(1, 40), arrival_s=rng.uniform(0, 0.8), after=after, think_s=0.01))
    uneven = dataclasses.replace(DEVICE, spread=(0.3, 0.5, 1.5, 1.7))
    machine = dataclasses.replace(MACHINE, cost=uneven, num_blocks=num_blocks, max_model_len=1600, overlap=True)
    result = run(work, roles, machine, router=router, seed=seed)
    assert all(line.is_complete for line in result.timelines)
    assert all(line.token_times_s == sorted(line.token_times_s) for line in result.timelines)
    assert all(line.token_times_s[0] > line.arrival_s for line in result.timelines)
    assert sum(result.num_routed[: roles.num_decode]) == len(work)
    assert sum(result.num_routed[roles.num_decode :]) == result.num_elsewhere > 10
    assert len(result.transfers) > 10
    assert any(line.num_preemptions for line in result.timelines) or roles != Roles(1, 1)
    assert 0.0 <= result.hidden_share <= 1.0
    assert 0 <= result.num_hit_tokens <= result.num_queried_tokens


def test_the_same_twice() -> None:
    work = [BenchRequest(prompt(n, 300 + 20 * n), 20, arrival_s=0.02 * n) for n in range(30)]
    uneven = dataclasses.replace(MACHINE, cost=dataclasses.replace(DEVICE, spread=(0.3, 0.5, 1.5, 1.7)))
    one, other, third = (run(work, Roles(1, 2), uneven, seed=seed) for seed in (1, 1, 2))
    assert one == other and one != third and one.transfers


def test_what_roles_need() -> None:
    work = [BenchRequest(prompt(1, 8), 2)]
    no_cache = CacheConfig(enable_prefix_caching=False).resolve("cpu")
    with pytest.raises(ConfigError, match="prefix cache"):
        simulate(work, MACHINE, CONFIG, no_cache, num_replicas=2, roles=Roles(1, 1))
    with pytest.raises(ConfigError, match="2 replicas, not of 3"):
        run(work, Roles(1, 1), num_replicas=3)
    with pytest.raises(ConfigError, match="calibrate again"):
        run(work, Roles(1, 1), dataclasses.replace(MACHINE, bytes_per_block=0))


def test_roles_are_written_as_they_are_read() -> None:
    assert Roles.parse("prefill=2,decode=13") == Roles(2, 13)
    assert str(Roles(2, 13)) == "prefill=2,decode=13"
    for text in ("", "prefill=1", "prefill=0,decode=1", "decode=1,prefill=1", "prefill=1,decode=-1"):
        with pytest.raises(ConfigError, match="prefill=P,decode=D"):
            Roles.parse(text)


RANKS = Ranks(number=4, num_layers=10, hidden_size=1000, vocab_size=8000, value_bytes=2)


def test_few_tokens_are_sent_to_all_at_once_and_many_go_round() -> None:
    """8 tokens are 16 kB: 48 kB at once take 1.048 ms, six times 4 kB round the ring 6.024. Of 8,000 it is 49 ms
    against 30. Two sums a layer, and each one's logits: three quarters of 16 kB a row come from the others."""
    link = Link(gb_s=1.0, latency_s=0.001)
    assert Ranks().seconds(StepWork(100, 4, 4, 0), LINK) == 0.0, "one rank tells nobody"
    assert RANKS.seconds(StepWork(8, 8, 8, 0), link) == pytest.approx(20 * 1.048e-3 + 0.001 + 8 * 12e-6)
    many = StepWork(8000, 1, 0, 0, 1)
    assert RANKS.seconds(many, link) == pytest.approx(20 * 6 * (0.001 + 0.004)), "no row has got a token"


def test_more_bytes_or_a_slower_link_never_take_less_time() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ranks = dataclasses.replace(RANKS, number=rng.randint(2, 16))
        work = StepWork(rng.randint(1, 9000), 1, 1, 0, 1)
        link = Link(rng.uniform(1, 900), rng.uniform(1e-6, 1e-4))
        more = dataclasses.replace(work, num_tokens=work.num_tokens + rng.randint(1, 500))
        assert ranks.seconds(work, link) < ranks.seconds(more, link)
        assert ranks.seconds(work, link) < ranks.seconds(work, dataclasses.replace(link, gb_s=0.9 * link.gb_s))
        assert ranks.seconds(work, link) < ranks.seconds(work, dataclasses.replace(link, latency_s=2 * link.latency_s))


def test_ranks_add_what_they_tell_each_other_to_every_step() -> None:
    work = [BenchRequest(prompt(1, 8), 3)]
    plain = run(work, None).timelines[0].token_times_s
    divided = run(work, None, dataclasses.replace(MACHINE, ranks=RANKS)).timelines[0].token_times_s
    extra = [RANKS.seconds(StepWork(8, 1, 1, 0, 1), LINK), RANKS.seconds(StepWork(1, 1, 1, 9), LINK)]
    assert divided[0] - plain[0] == pytest.approx(extra[0])
    assert divided[1] - divided[0] == pytest.approx(plain[1] - plain[0] + extra[1])
