"""What a router knows after something has got lost: a report, a replica, a request before its first token."""

from __future__ import annotations

from headway.core.kv.cache_report import CacheReport
from headway.front.cache_index import CacheIndex
from headway.front.router import Router

ABCD = [b"a", b"ab", b"abc", b"abcd"]


def router(num_replicas: int) -> Router:
    made = Router("prefix-aware", block_size=4)
    for place in range(num_replicas):
        made.add(place, max_num_seqs=100)
    return made


def send(to: Router, name: str, num_prompt_tokens: int, num_answer_tokens: int = 1, known: list[bytes] = ABCD) -> int:
    return to.route(
        name, num_prompt_tokens=num_prompt_tokens, num_answer_tokens=num_answer_tokens, digests=lambda: known
    )


def test_after_a_lost_report_nothing_is_known_until_all_is_told() -> None:
    index = CacheIndex()
    assert index.apply(0, CacheReport(0, ABCD))
    assert not index.apply(0, CacheReport(2, [b"x"])), "the one between may have told of evictions"
    assert not index.blocks_of(0) and not index.find(ABCD)
    assert index.apply(0, CacheReport(7, ABCD[:1], is_whole=True)) and index.find(ABCD) == [(1, 1)]


def test_a_request_that_ends_before_its_first_token_announces_nothing_any_more() -> None:
    to = router(2)
    place = send(to, "one", 17)
    assert to.index.find(ABCD) == [(1 << place, 4)]
    to.end("one")
    assert to.index.find(ABCD) == []


def test_the_load_of_a_replica_that_is_gone_is_in_no_average() -> None:
    to = router(3)
    assert [send(to, name, size, known=[]) for name, size in (("a", 39), ("b", 1), ("c", 1000))] == [0, 1, 2]
    to.index.apply(0, CacheReport(0, ABCD))
    to.remove(2)
    assert send(to, "d", 17) == 1, "40 tokens to do there, 19 over the average; here the whole prompt"
