"""Ranks that are silent for too long are told from those that compute."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from headway.worker.rank_life import BEAT_S, LOADING_SILENT_S, SILENT_S, TICK_S, LifeWatch, show_life


class Rank:
    """The rank's end of the socket."""

    def __init__(self, watch: LifeWatch, name: str) -> None:
        ours, self.life = socket.socketpair()
        self.problems: list[str] = []
        watch.follow(ours, name, self.problems.append)


def watched_rank() -> tuple[LifeWatch, Rank]:
    """One that has shown life, and is not loading any more."""
    watch = LifeWatch()
    watch.limit_s = SILENT_S
    rank = Rank(watch, "rank 1")
    rank.life.send(b".")
    return watch, rank


def pass_time(watch: LifeWatch, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        watch.pass_time(TICK_S)


def test_time_counts_from_the_first_sign_of_life() -> None:
    watch = LifeWatch()
    rank = Rank(watch, "rank 1")
    pass_time(watch, 1000.0)
    rank.life.send(b".")
    pass_time(watch, LOADING_SILENT_S)
    assert not rank.problems
    pass_time(watch, 2 * TICK_S)
    assert rank.problems == ["rank 1 has given no sign of life for 60 s"]


def test_a_rank_that_beats_is_never_lost_and_one_that_is_silent_soon_and_once() -> None:
    watch, stopped = watched_rank()
    well = Rank(watch, "rank 2")
    for _ in range(100):
        well.life.send(b".")
        pass_time(watch, BEAT_S)
    assert stopped.problems == ["rank 1 has given no sign of life for 10 s"]
    assert not well.problems


def test_time_in_which_rank_zero_was_held_up_hardly_counts() -> None:
    watch, rank = watched_rank()
    for _ in range(5):
        watch.pass_time(3600.0)
    assert not rank.problems


def test_an_end_is_no_silence() -> None:
    watch, rank = watched_rank()
    rank.life.close()
    pass_time(watch, 100.0)
    assert not rank.problems


def test_a_rank_ends_when_rank_zero_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of rank 0 beats as long as it is followed."""
    statuses: list[int] = []
    monkeypatch.setattr("headway.worker.rank_life.BEAT_S", 0.01)

    def ends(status: int) -> None:
        statuses.append(status)
        raise SystemExit

    def work() -> None:
        with contextlib.suppress(SystemExit):
            show_life(rank.life)

    monkeypatch.setattr("headway.worker.rank_life.os._exit", ends)
    watch = LifeWatch()
    rank = Rank(watch, "rank 1")
    thread = threading.Thread(target=work)
    thread.start()
    watch.start()
    thread.join(0.1)
    assert thread.is_alive() and not rank.problems
    watch.close()
    thread.join(10.0)
    assert statuses == [1]
