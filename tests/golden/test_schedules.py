"""Longer schedules, with requests that do not fit and give way, and one with overlapping steps, written out.

A change here is a change of what the engine does: look, then accept it.
"""

from __future__ import annotations

from tests.unit.core.driver import make_scheduler, request, schedule_text


def arrivals() -> dict[int, list]:
    return {
        0: [request("a", 5, 12, priority=2), request("b", 13, 8, priority=1)],
        2: [request("c", 2, 9, priority=0)],
        3: [request("d", 9, 2, priority=1), request("e", 1, 1, priority=9)],
    }


def test_fcfs() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8, max_num_seqs=3)
    assert schedule_text(scheduler, arrivals()) == FCFS


def test_priority() -> None:
    scheduler = make_scheduler(
        num_blocks=8, block_size=4, max_num_batched_tokens=8, max_num_seqs=3, scheduling_policy="priority"
    )
    assert schedule_text(scheduler, arrivals()) == PRIORITY


def test_fcfs_with_two_steps_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8, max_num_seqs=3)
    assert schedule_text(scheduler, arrivals(), max_in_flight=2) == OVERLAPPED


FCFS = """\
  0 a:5* b:3
  1 a:1* b:7
  2 a:1* b:3*
  3 a:1* b:1*
  4 a:1* b:1*
  5 a:1* b:1*
  6 a:1* b:1*
  7 a:1* b:1*
  8 a:1* -b
  9 a:1* c:2* e:1*
 10 a:1* c:1*
 11 a:1* c:1*
 12 c:1* b:7
 13 c:1* b:7
 14 c:1* b:5*
 15 b:1* c:1*
 16 c:1* d:7
 17 c:1* d:2*
 18 d:1*
"""

PRIORITY = """\
  0 b:8
  1 b:5* a:3
  2 b:1* a:2*
  3 b:1* a:1*
  4 b:1* a:1*
  5 b:1* a:1*
  6 b:1* a:1*
  7 b:1* a:1*
  8 b:1* a:1*
  9 a:1* c:2* e:1*
 10 c:1* a:1*
 11 c:1* a:1*
 12 c:1* a:1*
 13 c:1* a:1*
 14 c:1* d:7
 15 c:1* d:2*
 16 c:1* d:1*
 17 c:1*
"""

OVERLAPPED = """\
  0 a:5* b:3
  1 a:1* b:7
  2 a:1* b:3*
  3 a:1* b:1*
  4 a:1* b:1*
  5 a:1* b:1*
  6 a:1* b:1*
  7 a:1* b:1*
  8 a:1* -b
  9 a:1* c:2* e:1*
 10 a:1* c:1*
 11 a:1* c:1*
 12 c:1*
 13 c:1* b:7
 14 c:1* b:7
 15 c:1* b:5*
 16 b:1* c:1*
 17 c:1*
 18 d:8
 19 d:1*
 20 d:1*
 21
"""
