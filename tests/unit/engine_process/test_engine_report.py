"""Which tokens count as computed again, step by step; and what is counted on when an engine begins again."""

from __future__ import annotations

from headway.core import NewRequest, ScheduledRequest, SchedulerOutput
from headway.engine.beam_requests import BeamRequests
from headway.engine_process.engine_report import EngineCounters, RecomputedTokens
from headway.sampling_params import SamplingParams
from tests.unit.engine_process.small_engine import create_engine
from tests.unit.engine_stats import engine_stats

LIVE = frozenset({"a", "b"})


def share(name: str, *, computed: int, tokens: int, samples: bool = True) -> ScheduledRequest:
    return ScheduledRequest(name, tokens, computed, (), samples)


def enters(name: str, *, prompt: int, output: int = 0, found: int = 0) -> NewRequest:
    return NewRequest(name, (1,) * prompt, (1,) * output, None, num_computed_tokens=found)


class Counted:
    """A counter, and plans as its tests write them."""

    def __init__(self) -> None:
        self.counter = RecomputedTokens()
        self._num_steps = 0

    def step(
        self,
        *shares: ScheduledRequest,
        new: tuple[NewRequest, ...] = (),
        preempted: tuple[str, ...] = (),
        finished: tuple[str, ...] = (),
    ) -> int:
        """Returns how many tokens of this step were computed again."""
        num_tokens = sum(each.num_tokens for each in shares)
        plan = SchedulerOutput(self._num_steps, new, shares, preempted, finished, num_scheduled_tokens=num_tokens)
        self._num_steps += 1
        return self.counter.take(plan, LIVE, is_decode=num_tokens == len(shares))


def test_chunk_by_chunk_and_only_what_was_reached() -> None:
    counted = Counted()
    counted.step(share("a", computed=0, tokens=6, samples=False), new=(enters("a", prompt=20),))
    counted.step(share("a", computed=6, tokens=6, samples=False))
    counted.step(share("b", computed=0, tokens=1), new=(enters("b", prompt=1),), preempted=("a",))
    back = enters("a", prompt=20, found=4)
    for turn in range(1, 3):  # it has to leave again amid the way back
        assert counted.step(share("a", computed=4, tokens=5, samples=False), new=(back,)) == 5
        assert turn == 2 or counted.step(share("b", computed=1, tokens=1), preempted=("a",)) == 0
    assert counted.step(share("a", computed=9, tokens=11)) == 3, "12 had been computed"


def test_requests_that_end_are_forgotten() -> None:
    counted = Counted()
    counted.step(share("a", computed=0, tokens=2, samples=False), new=(enters("a", prompt=9),))
    counted.step(share("b", computed=0, tokens=1), new=(enters("b", prompt=1),), finished=("a",))
    counted.step(share("b", computed=1, tokens=1), preempted=("gone", "b"))
    assert counted.counter.has_left("b") and not counted.counter.has_left("gone")
    back = enters("b", prompt=1, output=2)
    assert counted.step(share("b", computed=0, tokens=1, samples=False), new=(back,), finished=("b",)) == 1
    counter = counted.counter
    assert not counter._amid_prompt and not counter._left and not counter._catching_up


def test_drafts_are_counted_on_when_an_engine_begins_again() -> None:
    engine = create_engine({"speculation": "ngram"})
    before = engine_stats(num_drafts=3, num_draft_tokens=9, num_accepted_tokens=5, num_accepted_at=[3, 2])
    counters = EngineCounters(
        engine.core.scheduler, BeamRequests(engine.tokenizer, vocab_size=engine.model_config.vocab_size), counted=before
    )
    engine.add_request("r", "abc", SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
    verified = []
    while engine.has_unfinished_requests():
        verified += [row for row in engine.step().report.rows if row.num_drafts]
    accepted = [row.num_accepted for row in verified]
    drafts = counters.stats().drafts
    assert drafts.num_wrong_drafts == sum(row.num_accepted < row.num_drafts for row in verified)
    assert sum(accepted) > 0 and drafts.num_drafts == 3 + len(accepted)
    assert drafts.num_accepted_tokens == 5 + sum(accepted) == sum(drafts.num_accepted_at)
    assert drafts.num_accepted_at[:2] == [3 + sum(map(bool, accepted)), 2 + sum(num > 1 for num in accepted)]
    assert len(drafts.num_accepted_at) == 8
