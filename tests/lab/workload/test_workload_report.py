"""The statistics of work, counted by hand."""

from __future__ import annotations

from headway_lab.workload import BenchRequest, statistics_of
from headway_lab.workload.workload_report import LengthStatistics, reusable_share


def test_lengths() -> None:
    found = LengthStatistics.of(list(range(1, 102)))
    assert (found.mean, found.p50, found.p90, found.p99, found.max, found.total) == (51, 51, 91, 100, 101, 5151)
    assert LengthStatistics.of([1, 2]).p50 == 1.5
    assert LengthStatistics.of([]).total == 0


def test_turns_of_conversations_count_for_the_rate_but_are_no_arrivals() -> None:
    work = [
        BenchRequest([1], 1, arrival_s=0.0),
        BenchRequest([1, 2, 3], 1, arrival_s=0.0, after=0, think_s=9.0),
        BenchRequest([1, 2, 3, 4, 5], 1, arrival_s=0.0, after=1, think_s=9.0),
        BenchRequest([1], 1, arrival_s=2.0),
    ]
    found = statistics_of(work)
    assert (found.num_conversations, found.num_turns, found.duration_s, found.rate) == (1, 3, 2.0, 1.0)


def test_what_is_reusable_is_whole_leading_blocks() -> None:
    work = [BenchRequest(list(ids), 2) for ids in ("abcdefgh", "abcdXXgh", "abcdefgX", "XXcdefgh")]
    # Blocks of 4: of the second prompt one, of the third one ("efgX" is new), of the fourth none ("efgh" is not first).
    assert reusable_share(work, block_size=4) == 8 / 32
    assert reusable_share(work, block_size=2) == (4 + 6) / 32
    assert reusable_share(work, block_size=16) == 0
    assert reusable_share([]) == 0
    turns = [BenchRequest([1, 2, 3, 4], 4), BenchRequest([1, 2, 3, 4, 9, 9, 9, 9, 5], 1, after=0)]
    assert reusable_share(turns, block_size=4) == 4 / 13
    assert reusable_share(turns, block_size=4, with_answers=True) == 8 / 13


def test_as_json_has_no_numbers_that_json_has_not() -> None:
    told = statistics_of([BenchRequest([1], 1), BenchRequest([2], 1)]).as_json()
    assert (told["rate"], told["gap_cv"], told["input"]["max"]) == (None, None, 1)
