"""When a prompt is computed elsewhere: cases worked out by hand, and what may never turn the answer round."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.front.roles import MOST_COUNTED, SHORT_TOKENS, PrefillChoice, computes_elsewhere

TOKEN_S = 2e-5  # an 8B model on an H200
BLOCK_TOKENS = 64
LINK_BLOCK_S = 2e-5  # 8 MB at 450 GB/s
LONGEST = MOST_COUNTED * 4096


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


@pytest.mark.parametrize(
    ("goes", "case"),
    [
        pytest.param(False, choice(), id="on idle replicas a prompt stays: computing takes as long, nobody is spared"),
        pytest.param(True, choice(num_generating=1), id="one who generates is enough on a fast link"),
        *[
            pytest.param(False, choice(size, num_generating=200, num_queued_decode=10_000), id=f"{size} tokens stay")
            for size in (1, BLOCK_TOKENS, SHORT_TOKENS)
        ],
        pytest.param(False, choice(num_generating=200, num_blocks=0, transfer_s=0.0), id="no whole block"),
        pytest.param(True, choice(num_queued_decode=4096), id="a queue here"),
        pytest.param(False, choice(num_queued_decode=4096, num_queued_prefill=4096), id="as long a queue there"),
        # One who generates is spared as long as the prompt takes: a queue a little longer than it is too long.
        pytest.param(True, choice(num_generating=1, num_queued_prefill=3500), id="a shorter queue there"),
        pytest.param(False, choice(num_generating=1, num_queued_prefill=4096), id="a queue there"),
        pytest.param(False, choice(num_generating=256, num_queued_prefill=LONGEST), id="a full batch, seconds there"),
        pytest.param(True, choice(num_generating=256, num_queued_prefill=LONGEST // 2), id="a full batch"),
        pytest.param(False, choice(num_generating=8, transfer_s=1.0), id="a slow link: 82 ms of computing"),
        pytest.param(True, choice(prefill_token_s=TOKEN_S / 2), id="a faster replica, nobody generates"),
    ],
)
def test_where_a_prompt_is_computed(goes: bool, case: PrefillChoice) -> None:
    assert computes_elsewhere(case) == goes


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
