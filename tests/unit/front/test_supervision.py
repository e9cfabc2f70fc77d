"""When an engine is unwell, when it is replaced, and how soon, with times that are written down."""

from __future__ import annotations

from headway.front.supervision import FIRST_STEP_GRACE_S, START_SILENT_S, Backoff, Patience, Watchdog


def serving(**patience: float) -> Watchdog:
    """The watchdog of an engine that has made a step."""
    watchdog = Watchdog(Patience(**patience))
    watchdog.note_ready()
    watchdog.note_step()
    return watchdog


def test_silence_is_a_problem_after_three_seconds_and_the_end_after_ten() -> None:
    watchdog = serving()
    watchdog.pass_time(3.0)
    assert watchdog.problem is None
    watchdog.pass_time(0.5)
    assert watchdog.problem == "the engine process has given no sign of life for 4 s"
    assert not watchdog.is_lost() and watchdog.is_lost(ending=True)
    watchdog.pass_time(6.0)
    assert not watchdog.is_lost()
    watchdog.pass_time(1.0)
    assert watchdog.is_lost()
    watchdog.note_life()
    assert watchdog.problem is None and not watchdog.is_lost()


def test_a_long_step_is_told_from_silence() -> None:
    watchdog = serving(slow_step_s=60.0, step_timeout_s=600.0)
    for second in range(1, 602):
        watchdog.pass_time(1.0)
        watchdog.note_life(turn_s=float(second))
        assert (watchdog.problem is not None) == (second > 60)
        assert watchdog.is_lost() == (second > 600)
    assert watchdog.problem == "the engine has made no progress for 601 s"
    watchdog.note_step()
    assert watchdog.problem is None and not watchdog.is_lost()


def test_the_first_step_may_compile() -> None:
    watchdog = Watchdog(Patience(step_timeout_s=100.0))
    watchdog.note_ready()
    watchdog.note_life(turn_s=FIRST_STEP_GRACE_S - 1)
    assert watchdog.problem is None and not watchdog.is_lost()
    watchdog.note_life(turn_s=FIRST_STEP_GRACE_S + 1)
    assert watchdog.problem is not None and watchdog.is_lost()


def test_loading_a_model_takes_its_time_but_not_for_ever() -> None:
    watchdog = Watchdog(Patience())
    for _ in range(10):
        watchdog.pass_time(START_SILENT_S - 1)
        assert not watchdog.is_lost()
        watchdog.note_life()
    watchdog.pass_time(START_SILENT_S + 1)
    assert watchdog.is_lost()


def test_silence_counts_from_the_first_sign_of_life_of_an_engine_that_is_ready() -> None:
    watchdog = Watchdog(Patience())
    watchdog.note_life()
    watchdog.note_ready()
    watchdog.pass_time(START_SILENT_S)
    assert watchdog.problem is None and not watchdog.is_lost()
    watchdog.pass_time(1.0)
    assert watchdog.problem is not None and watchdog.is_lost()
    watchdog.note_life()
    watchdog.pass_time(3.5)
    assert watchdog.problem is not None and not watchdog.is_lost()
    watchdog.note_start()
    watchdog.note_ready()
    watchdog.pass_time(3.5)
    assert watchdog.problem is None, "the next process starts in the same way"


def test_zero_means_never() -> None:
    watchdog = serving(step_timeout_s=0.0, hang_timeout_s=0.0)
    watchdog.note_life(turn_s=1e9)
    watchdog.pass_time(1e9)
    assert watchdog.problem is not None and not watchdog.is_lost()


def test_heartbeats_are_frequent_enough_for_short_times() -> None:
    assert Patience().heartbeat_s == 1.0
    assert Patience(slow_step_s=0.4).heartbeat_s == 0.1
    assert Patience(hang_timeout_s=0.0, step_timeout_s=0.0).heartbeat_s == 1.0


def test_delays_double_up_to_five_seconds_and_good_service_makes_up_for_failures() -> None:
    backoff = Backoff()
    delays = [backoff.next_delay_s(served_s=served_s) for served_s in (*[0.0] * 5, 0.8, 1.0, 0.2)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 0.5, 1.0]
