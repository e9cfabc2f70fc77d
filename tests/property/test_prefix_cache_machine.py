"""The prefix cache against the brute-force model once more, as a state machine: what fails is shrunk to a few calls."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headway.config import SchedulerConfig
from tests.property.driven_scheduler import STOP_TOKEN, Setting
from tests.property.side_by_side import SideBySide
from tests.unit.core.driver import make_request

BITS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Blocks of two tokens, two tokens to choose from, a handful of blocks."""

    pair: SideBySide

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([2, 1, 3]),
        max_num_seqs=st.integers(1, 4),
        max_chunk_tokens=st.sampled_from([None, 1, 3]),
        skip_window=st.integers(1, 3),
        num_host_slots=st.sampled_from([0, 2, 8]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_chunk_tokens: int | None,
        skip_window: int,
        num_host_slots: int,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + 6,
            max_chunk_tokens=max_chunk_tokens,
            skip_window=skip_window,
            max_head_skips=1,
        ).resolve("cpu")
        setting = Setting(config, num_blocks, block_size, prefix_caching=True, num_host_slots=num_host_slots)
        self.pair = SideBySide(setting)
        self.names = itertools.count()
        self.now_s = 0.0

    @rule(
        prompt=BITS,
        max_tokens=st.integers(1, 5),
        salt=st.sampled_from(["", "x"]),
        ttl=st.sampled_from([0.0, 3.0]),
        reads=st.sampled_from([True, True, False]),
    )
    def add(self, prompt: list[int], max_tokens: int, salt: str, ttl: float, reads: bool) -> None:
        self._add(prompt, max_tokens, cache_salt=salt or None, cache_ttl_s=ttl, reads_cache=reads)

    @rule(prompt=BITS, count=st.integers(2, 3))
    def add_some_alike(self, prompt: list[int], count: int) -> None:
        for _ in range(count):
            self._add(prompt, 2)

    def _add(self, prompt: list[int], max_tokens: int, **given: object) -> None:
        stop_token_ids = frozenset([STOP_TOKEN])
        name = f"r{next(self.names)}"
        self.pair.add(make_request(name, prompt, max_tokens=max_tokens, stop_token_ids=stop_token_ids, **given))

    @precondition(lambda self: self.pair.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.pair.abort(data.draw(st.sampled_from(self.pair.live)))

    @precondition(lambda self: len(self.pair.in_flight) < 3 and not self.pair.is_broken)
    @rule(
        tokens=st.lists(st.sampled_from([0, 1, 0, 1, STOP_TOKEN]), min_size=1, max_size=4),
        breaks=st.sampled_from([False, False, False, False, True]),
    )
    def launch(self, tokens: list[int], breaks: bool) -> None:
        if not self.pair.launch(itertools.cycle(tokens).__next__, self.now_s, breaks=breaks):
            assert self.pair.in_flight or not self.pair.live, "live requests, but nothing to do"

    @precondition(lambda self: self.pair.in_flight)
    @rule()
    def land(self) -> None:
        self.pair.land()

    @precondition(lambda self: self.pair.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        names = self.pair.in_flight[0].names
        failed = data.draw(st.sampled_from([names, names[:1], []]))
        self.pair.land(failed=failed, forgotten=[] if failed else names)

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None, derandomize=True)
