"""Routers on cases that can be worked out by hand, and the index of blocks against caches that report to it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.kv.cache_report import MAX_REPORTED, CacheChanges, CacheReport
from headway.errors import ConfigError
from headway.front.cache_index import CacheIndex, places_of
from headway.front.router import EXPECTED_TOKENS, ROUTERS, Router, expected_tokens

BLOCK = 4


def router(name: str, num_replicas: int = 3, *, max_num_seqs: int = 100) -> Router:
    made = Router(name, block_size=BLOCK)
    for place in range(num_replicas):
        made.add(place, max_num_seqs=max_num_seqs)
    return made


def digests(text: str) -> list[bytes]:
    """A letter is a block; a block is known by all that is before it."""
    return [text[: end + 1].encode() for end in range(len(text))]


class Work:
    """Requests one after the other."""

    def __init__(self, to: Router) -> None:
        self.router = to
        self._number = 0

    def send(self, text: str, num_answer_tokens: int = 1) -> int:
        """A prompt of so many blocks, and one token."""
        self._number += 1
        return self.router.route(
            f"r{self._number}",
            num_prompt_tokens=BLOCK * len(text) + 1,
            num_answer_tokens=num_answer_tokens,
            digests=lambda: digests(text),
        )

    def finish(self, number: int) -> None:
        self.router.note_tokens(f"r{number}", 1)
        self.router.end(f"r{number}")


def test_each_in_turn() -> None:
    work = Work(router("round-robin"))
    assert [work.send("a") for _ in range(5)] == [0, 1, 2, 0, 1]
    work.router.remove(2)
    assert [work.send("a") for _ in range(3)] == [0, 1, 0]
    work.router.suspend(0, True)
    assert [work.send("a") for _ in range(3)] == [1, 1, 1]
    work.router.suspend(1, True)
    assert [work.send("a") for _ in range(2)] == [0, 1], "if no other can"


def test_the_fewest_tokens_to_compute() -> None:
    work = Work(router("least-loaded"))
    assert work.send("abc", 10) == 0  # 23
    assert work.send("a", 10) == 1  # 15
    assert work.send("ab", 1) == 2  # 10
    assert work.send("a", 1) == 2  # 16
    assert work.send("a", 1) == 1
    assert [work.router.num_tokens(place) for place in range(3)] == [23, 21, 16]
    work.router.note_tokens("r1", 3)
    assert work.router.num_tokens(0) == 7, "its prompt is computed, and three of ten tokens"
    assert work.send("a", 1) == 0
    work.router.note_tokens("r1", 50)
    assert work.router.num_tokens(0) == 6, "an answer that is longer than expected"
    for number in range(1, 7):
        work.finish(number)
    assert [work.router.num_tokens(place) for place in range(3)] == [0, 0, 0]


def test_of_equals_each_in_turn() -> None:
    work = Work(router("least-loaded"))
    places = []
    for number in range(1, 7):
        places.append(work.send("a"))
        work.finish(number)
    assert places == [0, 1, 2, 0, 1, 2]


def test_the_longest_known_beginning_wins() -> None:
    work = Work(router("prefix-aware"))
    work.router.index.apply(1, CacheReport(0, digests("abcd")))
    work.router.index.apply(2, CacheReport(0, digests("ab")))
    assert work.send("abcx") == 1
    work.finish(1)
    assert work.send("abxx") == 2, "both know two blocks; it is this one's turn"
    work.finish(2)
    assert work.send("zzzz") == 0
    work.finish(3)


def test_a_replica_that_is_behind_by_more_than_it_would_save_is_passed_over() -> None:
    work = Work(router("prefix-aware", 2))
    work.router.index.apply(0, CacheReport(0, digests("abcd")))
    assert work.send("abcd", 31) == 0  # 1 + 31 tokens to do there, 16 on average
    assert work.send("abcd", 1) == 1, "there 16 over the average, a quarter of those up to it, 1 uncached; here 17"


def test_one_that_has_nothing_to_do_does_not_draw_a_prompt_from_where_it_is_known() -> None:
    """Seven replicas have 20 tokens to do, and one, as happens among many, has none."""
    work = Work(router("prefix-aware", 8))
    assert [work.send(letter * 4, 3) for letter in "abcdefgh"] == [*range(8)]
    work.finish(8)
    assert work.router.num_tokens(0) == 20 and work.router.num_tokens(7) == 0
    work.router.index.apply(0, CacheReport(0, digests("aaaa")))
    assert work.send("aaaa", 3) == 0, "20 are hardly more than the average of 17: 17 // 4 and 3 and 1, not 17"
    assert work.send("zzzz", 3) == 7, "what nobody knows goes to the one with the least to do"


def test_what_is_being_computed_counts_as_known() -> None:
    work = Work(router("prefix-aware", 2))
    assert work.send("abcdefgh") == 0
    assert work.send("z") == 1
    assert work.send("abcdefgh") == 0, "34 tokens to do there, but one of this request's; here 6 and 33"
    assert work.router.index.find(digests("abcdefgh")) == [(0b1, 8)]
    work.finish(1)
    assert work.router.index.find(digests("abcdefgh")) == [], "kept by nobody, as far as was reported"


def test_a_full_batch_comes_last() -> None:
    work = Work(router("prefix-aware", 2, max_num_seqs=2))
    work.router.index.apply(0, CacheReport(0, digests("abcdefgh")))
    assert [work.send("abcdefgh") for _ in range(2)] == [0, 0]
    assert work.send("abcdefgh") == 1, "a seat there, and the whole prompt to compute"


def test_what_all_requests_share_does_not_bring_them_to_one_place() -> None:
    work = Work(router("prefix-aware", 2))
    work.router.index.apply(0, CacheReport(0, digests("s")))
    places = [work.send("s" + letter * 4) for letter in "abcdefghijklmnopqrst"]
    assert abs(places.count(0) - places.count(1)) <= 1


def test_a_replica_that_is_gone_takes_its_requests_and_blocks_along() -> None:
    work = Work(router("prefix-aware", 2))
    work.router.index.apply(0, CacheReport(0, digests("abc")))
    assert work.send("abc") == 0
    work.router.remove(0)
    work.finish(1)  # too late: it does no harm
    assert work.send("abc") == 1 and len(work.router.index) == 0
    work.router.add(0, max_num_seqs=4)
    assert work.router.num_tokens(0) == 0
    work.router.remove(0)
    work.router.remove(1)
    with pytest.raises(ValueError, match="no replica"):
        work.send("a")


def test_names() -> None:
    assert set(ROUTERS) == {"round-robin", "least-loaded", "prefix-aware"}
    with pytest.raises(ConfigError, match="round-robin, least-loaded, prefix-aware"):
        Router("random", block_size=4)


def test_how_long_an_answer_is_expected_to_be() -> None:
    assert expected_tokens(50, None) == 50 and expected_tokens(10_000, None) == EXPECTED_TOKENS
    assert expected_tokens(50, 20.7) == 20 and expected_tokens(50, 90.0) == 50 and expected_tokens(50, 0.0) == 1


# ---- reports --------------------------------------------------------------------------------------------------------


class Cache:
    """Blocks that come and go at random."""

    def __init__(self, rng: random.Random) -> None:
        self.held: set[bytes] = set()
        self.changes = CacheChanges(lambda: self.held)
        self._rng = rng

    def change(self, count: int) -> None:
        for _ in range(count):
            digest = bytes([self._rng.randrange(40)])
            if digest in self.held:
                self.held.remove(digest)
                self.changes.evict(digest)
            else:
                self.held.add(digest)
                self.changes.store(digest)


@given(st.integers(0, 10**6), st.lists(st.sampled_from(["change", "report", "lose", "die", "ask"]), max_size=60))
def test_the_index_equals_the_caches_whatever_gets_lost(seed: int, events: Sequence[str]) -> None:
    rng = random.Random(seed)
    index, caches = CacheIndex(), [Cache(rng) for _ in range(3)]

    def tell(place: int, *, is_lost: bool = False) -> bool:
        report = caches[place].changes.report()
        if report is not None and not is_lost and not index.apply(place, report):
            assert not index.blocks_of(place), "nothing is known of it until it has told all"
            caches[place].changes.tell_all()
        return report is not None

    for event in events:
        place = rng.randrange(3)
        if event == "change":
            caches[place].change(rng.randrange(30))
        elif event == "report":
            tell(place)
        elif event == "lose":
            tell(place, is_lost=True)
        elif event == "ask":
            caches[place].changes.tell_all()
        else:
            caches[place] = Cache(rng)
            index.forget(place)
    for place, cache in enumerate(caches):
        cache.changes.store(b"last")  # a loss shows when something follows
        cache.held.add(b"last")
        while tell(place):
            pass
        assert set(index.blocks_of(place)) == cache.held
    every = set().union(*(cache.held for cache in caches))
    assert len(index) == len(every)
    for digest in every:
        [(bits, count)] = index.find([digest])
        assert count == 1 and places_of(bits) == [p for p, cache in enumerate(caches) if digest in cache.held]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=9))
def test_what_is_found_is_what_each_replica_has_of_a_prompt(known: Sequence[tuple[int, int]]) -> None:
    """Held, or announced beyond that, by replicas with gaps between their numbers."""
    index, prompt = CacheIndex(), digests("abcdefghijkl")
    for number, (num_held, num_coming) in enumerate(known):
        index.apply(31 * number, CacheReport(0, prompt[:num_held]))
        index.announce(31 * number, prompt[num_held:num_coming])
    found = {place: count for bits, count in index.find(prompt) for place in places_of(bits)}
    assert found == {31 * number: max(own) for number, own in enumerate(known) if max(own)}
    for number, (num_held, num_coming) in enumerate(known):
        index.withdraw(31 * number, prompt[num_held:num_coming])
    found = {place: count for bits, count in index.find(prompt) for place in places_of(bits)}
    assert found == {31 * number: num_held for number, (num_held, _) in enumerate(known) if num_held}


def test_blocks_that_two_requests_announce_are_withdrawn_by_the_first_of_them() -> None:
    index = CacheIndex()
    assert index.announce(1, digests("abc")) == digests("abc")
    assert index.announce(1, digests("abcd")) == digests("abcd")[3:]
    assert index.announce(2, digests("ab")) == digests("ab")
    assert index.find(digests("abcd")) == [(0b100, 2), (0b010, 4)]
    index.withdraw(1, digests("abc"))
    assert index.find(digests("abcd")) == [(0b100, 2)], "a beginning is missing"


def test_a_large_cache_is_told_in_parts() -> None:
    held = [number.to_bytes(4, "big") for number in range(MAX_REPORTED + 10)]
    changes, index = CacheChanges(lambda: held), CacheIndex()
    reports = [report for _ in range(3) if (report := changes.report()) is not None]
    assert [(report.number, report.is_whole, len(report.stored)) for report in reports] == [
        (0, True, MAX_REPORTED),
        (1, False, 10),
    ]
    assert all(index.apply(0, report) for report in reports) and set(index.blocks_of(0)) == set(held)


def test_what_comes_and_goes_between_two_reports_is_not_told() -> None:
    changes = CacheChanges(list)
    first = changes.report()
    assert first is not None and first.is_whole and not first.stored
    changes.store(b"a")
    changes.evict(b"a")
    assert changes.report() is None
    changes.store(b"b")
    assert changes.report() == CacheReport(1, [b"b"], [], False)
    changes.evict(b"b")
    changes.store(b"b")
    assert changes.report() is None


def test_prompts_and_answers_are_counted_apart() -> None:
    made = router("least-loaded", 1)
    work = Work(made)
    work.send("abc", num_answer_tokens=10)
    work.send("ab", num_answer_tokens=10)
    assert (made.num_prompt_tokens(0), made.num_generating(0), made.num_tokens(0)) == (13 + 9, 0, 13 + 9 + 20)
    made.note_tokens("r1", 1)
    made.note_tokens("r1", 1)
    assert (made.num_prompt_tokens(0), made.num_generating(0), made.num_tokens(0)) == (9, 1, 9 + 18)
    assert (made.num_uncached("r1"), made.num_uncached("r2")) == (0, 9)
    made.end("r1")
    made.end("r2")  # before its first token
    assert (made.num_prompt_tokens(0), made.num_generating(0), made.num_tokens(0)) == (0, 0, 0)


def test_a_prompt_that_is_computed_elsewhere_is_no_work_here() -> None:
    made = router("prefix-aware", 2)
    work = Work(made)
    place = work.send("abc")
    made.note_elsewhere("r1", 1)
    assert (made.num_prompt_tokens(place), made.num_tokens(place), made.num_generating(place)) == (1, 2, 0)
    assert work.send("abcd") == place, "its blocks are going to be here all the same"
    made.note_tokens("r1", 1)
    assert made.num_generating(place) == 1
    work.finish(1)
    work.finish(2)
    assert (made.num_prompt_tokens(place), made.num_tokens(place), made.num_generating(place)) == (0, 0, 0)


@pytest.mark.parametrize("name", ROUTERS)
def test_what_is_cached_is_known_where_it_decides_nothing(name: str) -> None:
    made = Router(name, block_size=BLOCK, counts_uncached=True)
    made.add(0, max_num_seqs=8)
    made.index.apply(0, CacheReport(0, digests("ab")))
    Work(made).send("abc")
    assert made.num_uncached("r1") == BLOCK + 1


def test_a_router_knows_whether_anyone_is_well() -> None:
    to = router("least-loaded", 2)
    to.suspend(0, True)
    assert to.has_healthy
    to.suspend(1, True)
    assert not to.has_healthy
    to.suspend(0, False)
    to.remove(0)
    assert not to.has_healthy


@given(st.lists(st.tuples(st.sampled_from("rtef"), st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_counts_are_those_of_the_requests_that_there_are(moves: list[tuple[str, int, int]]) -> None:
    to = router("least-loaded", 2)
    left: dict[int, list[int]] = {}  # prompt tokens, answer tokens
    places: dict[int, int] = {}
    for move, number, size in moves:
        if move == "r" and number not in left:
            places[number] = to.route(f"r{number}", num_prompt_tokens=size, num_answer_tokens=9, digests=list)
            left[number] = [size, 9]
        elif number in left and move == "t":
            to.note_tokens(f"r{number}", size)
            left[number] = [0, max(left[number][1] - size, 0)]
        elif number in left and move == "f":
            to.end(f"r{number}")
            del left[number]
        elif number in left and move == "e" and left[number][0] >= size:
            to.note_elsewhere(f"r{number}", size)
            left[number][0] = size
        for place in range(2):
            own = [counts for key, counts in left.items() if places[key] == place]
            assert to.num_prompt_tokens(place) == sum(prompt for prompt, _ in own)
            assert to.num_generating(place) == sum(not prompt for prompt, _ in own)
            assert to.num_tokens(place) == sum(map(sum, own))
