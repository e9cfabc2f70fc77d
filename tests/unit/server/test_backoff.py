"""The delays between restarts."""

from __future__ import annotations

from headway.rpc.backoff import Backoff


def test_delays_double_up_to_half_a_minute() -> None:
    backoff = Backoff()
    delays = [backoff.next_delay_s(served_s=0.0) for _ in range(100)]
    assert delays[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert delays[-1] == 30.0


def test_a_minute_of_good_service_makes_up_for_earlier_failures() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.next_delay_s(served_s=59.0)
    assert backoff.next_delay_s(served_s=60.0) == 0.5
    assert backoff.next_delay_s(served_s=1.0) == 1.0
