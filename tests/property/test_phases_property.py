"""The phases of requests that go on in other engines, at random moments, however late the front end hears of it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from headway.front.request_phases import RequestPhases
from headway.wire.messages import RequestTimings

SHORT_S = st.floats(0.0, 100.0)
NOTHING_S = 1e-6
"""Floating-point error."""


@dataclass
class Visit:
    """A request in one engine: how long it takes until each thing happens there, and when it is over."""

    travel_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    news_s: float
    """How late the front end hears of what happens."""
    stay: int
    """How far it gets: 0 it waits, 1 it is in the batch, 2 it has a token; the last visit gets to its end."""


VISITS = st.lists(
    st.builds(Visit, SHORT_S, SHORT_S, SHORT_S, SHORT_S, SHORT_S, st.integers(0, 2)), min_size=1, max_size=5
)


@given(VISITS, SHORT_S)
def test_no_phase_is_negative_and_the_first_engine_counts(visits: list[Visit], arrival_s: float) -> None:
    phases, now_s = RequestPhases(arrival_s), arrival_s
    begun_s: float | None = None  # as the front end heard of it
    first_s: float | None = None
    for number, visit in enumerate(visits):
        is_last, had_token = number == len(visits) - 1, first_s is not None
        if number:
            phases.note_move()
        stay = 2 if is_last else visit.stay
        now_s += visit.travel_s + visit.queue_s
        if stay >= 1:
            begun_s = now_s if begun_s is None else begun_s
            phases.note_begun(now_s)
        if stay == 2:
            now_s += visit.prefill_s
            first_s = now_s if first_s is None else first_s
            phases.note_token(now_s)
            now_s += visit.decode_s
        now_s += visit.news_s
        if is_last:
            prefill_s = 0.0 if had_token else visit.prefill_s
            last = RequestTimings(visit.queue_s, prefill_s, visit.decode_s, 3, 7)
    found = phases.timings(last, now_s)
    assert min(found.queue_s, found.prefill_s, found.decode_s) >= 0.0
    assert (found.num_preemptions, found.num_cached_tokens) == (3, 7)
    if len(visits) == 1:
        assert found == last, "what one engine measured is more exact than what is heard of it"
    else:
        assert begun_s is not None and first_s is not None
        expected = (begun_s - arrival_s, first_s - begun_s, now_s - first_s)
        for own, wanted in zip((found.queue_s, found.prefill_s, found.decode_s), expected, strict=True):
            assert abs(own - wanted) < NOTHING_S


@given(SHORT_S, SHORT_S, SHORT_S, SHORT_S, st.booleans(), st.booleans())
def test_whatever_was_heard_of_the_phases_add_up(
    prefill_s: float, decode_s: float, elapsed_s: float, heard_s: float, knows_begun: bool, knows_first: bool
) -> None:
    """News that was lost with an engine, clocks of other machines: no sum of a histogram may fall for it."""
    phases = RequestPhases(50.0)
    if knows_begun:
        phases.note_begun(heard_s)
    if knows_first:
        phases.note_token(heard_s)
    phases.note_move()
    found = phases.timings(RequestTimings(1.0, prefill_s, decode_s), 50.0 + elapsed_s)
    assert min(found.queue_s, found.prefill_s, found.decode_s) >= 0.0
    assert abs(found.queue_s + found.prefill_s + found.decode_s - elapsed_s) < NOTHING_S
