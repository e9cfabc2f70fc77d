"""Routers on cases that can be worked out by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from headway.core import Request
from headway.errors import ConfigError
from headway.lab.sim.router import ROUTERS, LeastLoaded, PrefixAware, RoundRobin, create_router


@dataclass
class Loaded:
    """A replica with so many tokens to do."""

    num_tokens: int = 0

    def num_outstanding_tokens(self, now_s: float) -> int:
        return self.num_tokens


def request(prompt: list[int]) -> Request:
    return Request(str(random.random()), prompt, max_tokens=4)


def routed(router: RoundRobin | LeastLoaded | PrefixAware, prompt: list[int], *loads: int) -> int:
    return router.choose(request(prompt), [Loaded(load) for load in loads], now_s=0.0)


def test_each_in_turn() -> None:
    router = RoundRobin()
    assert [routed(router, [1], 0, 9, 0) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_fewest_outstanding_tokens_and_of_several_the_first() -> None:
    router = LeastLoaded()
    assert routed(router, [1], 30, 10, 20) == 1
    assert routed(router, [1], 10, 10) == 0


def prefix_aware(num_blocks: int = 100) -> PrefixAware:
    return PrefixAware(block_size=4, num_blocks=num_blocks)


def test_the_longest_known_beginning_wins() -> None:
    router = prefix_aware()
    assert routed(router, [1] * 8, 0, 0, 0) == 0
    assert routed(router, [1] * 4 + [2] * 8, 3, 0, 0) == 0, "one block is known there"
    assert routed(router, [3] * 8, 3, 0, 0) == 1, "unknown: the least loaded"
    assert routed(router, [3] * 8 + [1] * 8, 0, 5, 0) == 1


def test_a_replica_that_is_behind_by_more_than_it_would_save_is_passed_over() -> None:
    router = prefix_aware()
    assert routed(router, [1] * 8, 0, 0) == 0
    assert routed(router, [1] * 8, 1007, 1000) == 0, "8 tokens are saved"
    assert routed(router, [1] * 8, 1009, 1000) == 1
    assert routed(router, [1] * 8, 7, 6) == 1, "by now both know it, and the second has less to do"


def test_what_all_requests_share_does_not_bring_them_to_one_place() -> None:
    router = prefix_aware()
    replicas = [Loaded(), Loaded()]
    for tail in range(20):
        place = router.choose(request([9] * 4 + [tail] * 16), replicas, now_s=0.0)
        replicas[place].num_tokens += 24
    assert abs(replicas[0].num_tokens - replicas[1].num_tokens) <= 24


def test_only_the_last_blocks_are_remembered() -> None:
    router = prefix_aware(num_blocks=2)
    assert routed(router, [1] * 8, 0, 0) == 0
    assert routed(router, [2] * 8, 0, 9) == 0
    assert routed(router, [1] * 8, 1, 0) == 1, "the first replica has been sent two other blocks since"


def test_a_block_that_is_not_full_says_nothing() -> None:
    router = prefix_aware()
    assert routed(router, [1, 1, 1], 0, 0) == 0
    assert routed(router, [1, 1, 1], 1, 0) == 1


def test_by_name() -> None:
    kinds = {name: type(create_router(name, block_size=4, num_blocks=8)) for name in ROUTERS}
    assert kinds == {"round-robin": RoundRobin, "least-loaded": LeastLoaded, "prefix-aware": PrefixAware}
    with pytest.raises(ConfigError, match="round-robin, least-loaded, prefix-aware"):
        create_router("random", block_size=4, num_blocks=8)
