"""One small schedule per policy, on one seat, so that it shows who goes first; and the guard against starvation.

A change here is a change of what the engine does: look, then accept it.
"""

from __future__ import annotations

from headway.core import PrefixCache, Request
from tests.unit.core.driver import make_scheduler, request, schedule_text

STEP_S = 0.02


def schedule(policy: str, arrivals: dict[int, list[Request]], **options: object) -> str:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy=policy, **options)
    return schedule_text(scheduler, arrivals, step_s=STEP_S)


def test_fcfs() -> None:
    """The short one came after the long one, and waits for it."""
    arrivals = {
        0: [request("a", 3, 3)],
        1: [request("long", 3, 4), request("short", 3, 1)],
    }
    assert schedule("fcfs", arrivals) == FCFS


def test_priority() -> None:
    """The urgent one passes b, but does not push a out although that matters less, too."""
    arrivals = {
        0: [request("a", 3, 3, priority=5)],
        1: [request("b", 3, 2, priority=5), request("urgent", 3, 2, priority=1)],
    }
    assert schedule("priority", arrivals) == PRIORITY


def test_sjf() -> None:
    """The short one passes the long one. Both wait for a, which is predicted to be longer still, but runs."""
    arrivals = {
        0: [request("a", 3, 3, predicted_tokens=50)],
        1: [request("long", 3, 4, predicted_tokens=9), request("short", 3, 2, predicted_tokens=2)],
    }
    assert schedule("sjf", arrivals) == SJF


def test_srpt() -> None:
    """The short one displaces the long one, which comes back with all its tokens when nobody shorter waits."""
    arrivals = {
        0: [request("long", 3, 6, predicted_tokens=30)],
        2: [request("short", 3, 2, predicted_tokens=2), request("medium", 3, 2, predicted_tokens=12)],
    }
    assert schedule("srpt", arrivals) == SRPT


def test_ltr() -> None:
    """In the order of the score, which is no length; d has none and counts as long as it may become."""
    arrivals = {
        0: [request("a", 3, 3)],
        1: [
            request("d", 3, 2),
            request("b", 3, 2, predicted_tokens=0.7),
            request("c", 3, 2, predicted_tokens=0.2),
        ],
    }
    assert schedule("ltr", arrivals) == LTR


def test_hrrn() -> None:
    """The first short one passes the long one; by the time of the second one the long one has waited enough."""
    arrivals = {
        0: [request("a", 3, 5, predicted_tokens=5), request("long", 3, 2, predicted_tokens=8)],
        3: [request("short", 3, 2, predicted_tokens=2)],
        6: [request("late", 3, 2, predicted_tokens=2)],
    }
    assert schedule("hrrn", arrivals) == HRRN


def test_slo() -> None:
    """With half its time gone, tight displaces what has no target. Who cannot be in time lets loose pass."""
    arrivals = {
        0: [request("batch", 3, 7)],
        1: [request("tight", 3, 2, ttft_target_s=0.1), request("loose", 3, 2, ttft_target_s=0.4)],
        2: [request("missed", 3, 2, ttft_target_s=0.01)],
    }
    assert schedule("slo", arrivals) == SLO


def test_fair() -> None:
    """Tenant a was first and sends most; b, who comes later, has every second turn."""
    arrivals = {
        0: [request("a1", 3, 3, tenant="a"), request("a2", 3, 3, tenant="a"), request("a3", 3, 3, tenant="a")],
        2: [request("b1", 3, 2, tenant="b"), request("b2", 3, 2, tenant="b")],
    }
    assert schedule("fair", arrivals) == FAIR


def test_fair_beside_a_long_prompt() -> None:
    """The prompt that is under way leaves room in the step for the one of b, who has had less."""
    arrivals = {
        0: [request("long", 50, 2, tenant="a"), request("next", 4, 2, tenant="a")],
        1: [request("b1", 5, 3, tenant="b")],
    }
    scheduler = make_scheduler(max_num_batched_tokens=16, scheduling_policy="fair")
    assert schedule_text(scheduler, arrivals, step_s=STEP_S) == FAIR_BESIDE_A_LONG_PROMPT


def test_mlfq() -> None:
    """A long prompt counts as much as 32 tokens: whoever has had less displaces it, one after the other."""
    arrivals = {
        0: [request("deep", 8192, 4)],
        2: [request("short", 3, 2)],
        3: [request("next", 3, 2)],
    }
    assert schedule("mlfq", arrivals, num_blocks=2100, max_num_batched_tokens=8192) == MLFQ


def test_prefix() -> None:
    """Of two that came together, the one goes first that finds most of its prompt in the cache."""
    arrivals = {
        0: [request("x", 9, 2)],
        1: [request("other", 9, 2, cache_salt="o"), request("same", 9, 2)],
    }
    assert schedule("prefix", arrivals, prefix_cache=PrefixCache()) == PREFIX


def test_the_guard_against_starvation() -> None:
    """Short ones pass the long one until it has waited 60 ms more than in order of arrival; then s5 must wait."""
    arrivals = {number: [request(f"s{number}", 3, 2, predicted_tokens=1)] for number in range(1, 9, 2)}
    arrivals[0] = [request("a", 3, 2, predicted_tokens=1), request("long", 3, 2, predicted_tokens=9)]
    assert schedule("sjf", arrivals, starvation_ms=60, starvation_stretch=1) == THE_GUARD_AGAINST_STARVATION


FCFS = """\
  0 a:3*
  1 a:1*
  2 a:1*
  3 long:3*
  4 long:1*
  5 long:1*
  6 long:1*
  7 short:3*
"""

PRIORITY = """\
  0 a:3*
  1 a:1*
  2 a:1*
  3 urgent:3*
  4 urgent:1*
  5 b:3*
  6 b:1*
"""

SJF = """\
  0 a:3*
  1 a:1*
  2 a:1*
  3 short:3*
  4 short:1*
  5 long:3*
  6 long:1*
  7 long:1*
  8 long:1*
"""

SRPT = """\
  0 long:3*
  1 long:1*
  2 short:3* -long
  3 short:1*
  4 medium:3*
  5 medium:1*
  6 long:5*
  7 long:1*
  8 long:1*
  9 long:1*
"""

LTR = """\
  0 a:3*
  1 a:1*
  2 a:1*
  3 c:3*
  4 c:1*
  5 b:3*
  6 b:1*
  7 d:3*
  8 d:1*
"""

HRRN = """\
  0 a:3*
  1 a:1*
  2 a:1*
  3 a:1*
  4 a:1*
  5 short:3*
  6 short:1*
  7 long:3*
  8 long:1*
  9 late:3*
 10 late:1*
"""

SLO = """\
  0 batch:3*
  1 batch:1*
  2 batch:1*
  3 batch:1*
  4 tight:3* -batch
  5 tight:1*
  6 loose:3*
  7 loose:1*
  8 missed:3*
  9 missed:1*
 10 batch:7*
 11 batch:1*
 12 batch:1*
"""

FAIR = """\
  0 a1:3*
  1 a1:1*
  2 a1:1*
  3 b1:3*
  4 b1:1*
  5 a2:3*
  6 a2:1*
  7 a2:1*
  8 b2:3*
  9 b2:1*
 10 a3:3*
 11 a3:1*
 12 a3:1*
"""

FAIR_BESIDE_A_LONG_PROMPT = """\
  0 long:16
  1 long:16
  2 long:11 b1:5*
  3 b1:1* long:7* next:4*
  4 long:1* b1:1* next:1*
"""

MLFQ = """\
  0 deep:8192*
  1 deep:1*
  2 short:3* -deep
  3 short:1*
  4 next:3*
  5 next:1*
  6 deep:8192
  7 deep:2*
  8 deep:1*
"""

PREFIX = """\
  0 x:9*
  1 x:1*
  2 same:1*
  3 same:1*
  4 other:9*
  5 other:1*
"""

THE_GUARD_AGAINST_STARVATION = """\
  0 a:3*
  1 a:1*
  2 s1:3*
  3 s1:1*
  4 s3:3*
  5 s3:1*
  6 long:3*
  7 long:1*
  8 s5:3*
  9 s5:1*
 10 s7:3*
 11 s7:1*
"""
