"""Small schedules: of sealed batches, and of policies that let one request displace another. Every other schedule is
compared with a brute-force model in `tests/property`.

A row is a request, a column is a step: how many tokens it computes there, `*` if that yields one, `-` if it gives way.
A change here is a change of what the engine does: look, then accept it.
"""

from __future__ import annotations

from headway.core import Request
from tests.unit.core.driver import make_scheduler, request, schedule_rows


def batched(mode: str) -> dict[str, str]:
    """The same requests for each mode, so that two schedules can be compared row by row."""
    arrivals = {
        0: [request("a", 3, 2), request("b", 3, 5)],
        1: [request("c", 3, 3), request("big", 9, 2)],
        2: [request("d", 3, 2)],
        9: [request("e", 3, 1)],
    }
    return schedule_rows(make_scheduler(batching=mode, max_num_seqs=2), arrivals, step_s=0.02)


def by_policy(name: str, arrivals: dict[int, list[Request]], **options: object) -> dict[str, str]:
    """On one seat, so that it shows who goes first."""
    return schedule_rows(make_scheduler(max_num_seqs=1, scheduling_policy=name, **options), arrivals, step_s=0.02)


def test_continuous() -> None:
    """c takes a's seat in the very next step, big and d those of b and c."""
    assert batched("continuous") == {
        "a": "3* 1*",
        "b": "3* 1* 1* 1* 1*",
        "c": ".  .  3* 1* 1*",
        "big": ".  .  .  .  .  9* 1*",
        "d": ".  .  .  .  .  3* 1*",
        "e": ".  .  .  .  .  .  .  .  .  3*",
    }


def test_static() -> None:
    """Nobody takes a's seat before b is done: batches of two, in order of arrival."""
    assert batched("static") == {
        "a": "3* 1*",
        "b": "3* 1* 1* 1* 1*",
        "c": ".  .  .  .  .  3* 1* 1*",
        "big": ".  .  .  .  .  9* 1*",
        "d": ".  .  .  .  .  .  .  .  3* 1*",
        "e": ".  .  .  .  .  .  .  .  .  .  3*",
    }


def test_dynamic() -> None:
    """As static, but c and d are alike and pass big; and e waits 50 ms for others that do not come."""
    assert batched("dynamic") == {
        "a": "3* 1*",
        "b": "3* 1* 1* 1* 1*",
        "c": ".  .  .  .  .  3* 1* 1*",
        "d": ".  .  .  .  .  3* 1*",
        "big": ".  .  .  .  .  .  .  .  9* 1*",
        "e": ".  .  .  .  .  .  .  .  .  .  .  .  3*",
    }


def test_srpt() -> None:
    """The short one displaces the long one, which comes back with all its tokens when nobody shorter waits."""
    arrivals = {
        0: [request("long", 3, 6, predicted_tokens=30)],
        2: [request("short", 3, 2, predicted_tokens=2), request("medium", 3, 2, predicted_tokens=12)],
    }
    assert by_policy("srpt", arrivals) == {
        "long": "3* 1* -  .  .  .  5* 1* 1* 1*",
        "short": ".  .  3* 1*",
        "medium": ".  .  .  .  3* 1*",
    }


def test_slo() -> None:
    """With half its time gone, tight displaces what has no target. Who cannot be in time lets loose pass."""
    arrivals = {
        0: [request("batch", 3, 7)],
        1: [request("tight", 3, 2, ttft_target_s=0.1), request("loose", 3, 2, ttft_target_s=0.4)],
        2: [request("missed", 3, 2, ttft_target_s=0.01)],
    }
    assert by_policy("slo", arrivals) == {
        "batch": "3* 1* 1* 1* -  .  .  .  .  .  7* 1* 1*",
        "tight": ".  .  .  .  3* 1*",
        "loose": ".  .  .  .  .  .  3* 1*",
        "missed": ".  .  .  .  .  .  .  .  3* 1*",
    }


def test_mlfq() -> None:
    """A long prompt counts as much as 32 tokens: whoever has had less displaces it, one after the other."""
    arrivals = {0: [request("deep", 8192, 4)], 2: [request("short", 3, 2)], 3: [request("next", 3, 2)]}
    assert by_policy("mlfq", arrivals, num_blocks=2100, max_num_batched_tokens=8192) == {
        "deep": "8192* 1*    -     .     .     .     8192  2*    1*",
        "short": ".     .     3*    1*",
        "next": ".     .     .     .     3*    1*",
    }
