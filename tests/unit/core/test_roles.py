"""When a prompt is computed elsewhere: cases worked out by hand, and what may never turn the answer round."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.core.routing import MOST_COUNTED, SHORT_TOKENS, PrefillChoice, computes_elsewhere

TOKEN_S = 2e-5  # an 8B model on an H200
BLOCK_TOKENS = 64
LINK_BLOCK_S = 2e-5  # 8 MB at 450 GB/s


def choice(num_uncached: int = 4096, **others: Any) -> PrefillChoice:
    num_blocks = num_uncached // BLOCK_TOKENS
    plain = PrefillChoice(
        num_uncached=num_uncached,
        num_queued_prefill=0,
        num_queued_decode=0,
        num_generating=0,
        prefill_token_s=TOKEN_S,
        decode_token_s=TOKEN_S,
        transfer_s=num_blocks * LINK_BLOCK_S,
        num_blocks=num_blocks,
    )
    return dataclasses.replace(plain, **others)


def test_on_idle_replicas_a_prompt_stays() -> None:
    # Computing takes as long on either, and nobody is spared.
    assert not computes_elsewhere(choice(4096))


def test_one_who_generates_is_enough_on_a_fast_link() -> None:
    # 82 ms of computing against 1.3 ms of sending and as much of finding.
    assert computes_elsewhere(choice(4096, num_generating=1))


@pytest.mark.parametrize("num_tokens", [1, BLOCK_TOKENS, SHORT_TOKENS])
def test_short_parts_stay(num_tokens: int) -> None:
    assert not computes_elsewhere(choice(num_tokens, num_generating=200, num_queued_decode=10_000))


def test_a_prompt_without_a_whole_block_stays() -> None:
    assert not computes_elsewhere(choice(4096, num_generating=200, num_blocks=0, transfer_s=0.0))


def test_a_queue_here_sends_a_prompt_away() -> None:
    assert computes_elsewhere(choice(4096, num_queued_decode=4096))
    assert not computes_elsewhere(choice(4096, num_queued_decode=4096, num_queued_prefill=4096))


def test_a_queue_there_keeps_it() -> None:
    # One who generates is spared as long as the prompt takes: a queue that is a little longer than it is too long.
    assert computes_elsewhere(choice(4096, num_generating=1, num_queued_prefill=3500))
    assert not computes_elsewhere(choice(4096, num_generating=1, num_queued_prefill=4096))


def test_a_full_batch_does_not_fill_the_other_replica_for_seconds() -> None:
    longest = MOST_COUNTED * 4096
    assert not computes_elsewhere(choice(4096, num_generating=256, num_queued_prefill=longest))
    assert computes_elsewhere(choice(4096, num_generating=256, num_queued_prefill=longest // 2))


def test_a_slow_link_keeps_it() -> None:
    # A second to send what takes 82 ms to compute.
    assert not computes_elsewhere(choice(4096, num_generating=8, transfer_s=1.0))


def test_a_faster_prefill_replica_gets_it_even_when_nobody_generates() -> None:
    assert computes_elsewhere(choice(4096, prefill_token_s=TOKEN_S / 2))


counts = st.integers(0, 20_000)
seconds = st.floats(0.0, 1.0)
choices = st.builds(
    PrefillChoice,
    num_uncached=counts,
    num_queued_prefill=counts,
    num_queued_decode=counts,
    num_generating=st.integers(0, 300),
    prefill_token_s=st.floats(1e-7, 1e-3),
    decode_token_s=st.floats(1e-7, 1e-3),
    transfer_s=seconds,
    num_blocks=st.integers(0, 300),
)


@given(choices, st.sampled_from(["num_generating", "num_queued_decode", "decode_token_s"]), st.integers(1, 1000))
def test_more_to_do_here_never_keeps_a_prompt_here(before: PrefillChoice, name: str, more: int) -> None:
    assume(computes_elsewhere(before))
    factor = 1e-6 if name == "decode_token_s" else 1
    assert computes_elsewhere(dataclasses.replace(before, **{name: getattr(before, name) + factor * more}))


@given(
    choices,
    st.sampled_from(["num_queued_prefill", "transfer_s", "prefill_token_s", "num_blocks"]),
    st.integers(1, 1000),
)
def test_more_to_do_there_never_sends_a_prompt_there(before: PrefillChoice, name: str, more: int) -> None:
    assume(before.num_blocks and not computes_elsewhere(before))
    factor = 1e-6 if name in ("transfer_s", "prefill_token_s") else 1
    assert not computes_elsewhere(dataclasses.replace(before, **{name: getattr(before, name) + factor * more}))
