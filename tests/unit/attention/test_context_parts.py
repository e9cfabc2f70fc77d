"""How contexts are divided: every token once, within the promised limits, and about evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.attention.triton_paged import (
    END,
    FIRST_PART,
    NUM_PARTS,
    REQUEST,
    ROW,
    SEQ_LEN,
    START,
    ContextParts,
)

H200 = ContextParts(tile=64, num_heads=8, num_programs=396)

devices = st.builds(
    ContextParts,
    tile=st.sampled_from([32, 64, 128]),
    num_heads=st.sampled_from([1, 2, 3, 8, 16]),
    num_programs=st.sampled_from([4, 16, 396, 432]),
)
lengths = st.lists(st.one_of(st.integers(0, 70), st.integers(0, 9_000)), max_size=80)


def parts_of(device: ContextParts, seq_lens: list[int]) -> NDArray[np.int32]:
    return device.of(np.array(seq_lens, dtype=np.int64), 1000 + np.arange(len(seq_lens)))


@given(devices, lengths)
def test_every_token_is_in_one_part_and_parts_know_where_they_lie(device: ContextParts, seq_lens: list[int]) -> None:
    parts = parts_of(device, seq_lens)
    for request, seq_len in enumerate(seq_lens):
        own = parts[parts[:, REQUEST] == request]
        tokens = [token for part in own for token in range(part[START], part[END])]
        assert tokens == list(range(seq_len))
        assert (own[:, START] % device.tile == 0).all() and (own[:, START] < own[:, END]).all()
        assert (own[:, ROW] == 1000 + request).all() and (own[:, SEQ_LEN] == seq_len).all()
        (places,) = np.nonzero(parts[:, REQUEST] == request)
        assert (own[:, FIRST_PART] + np.arange(len(own)) == places).all() and (own[:, NUM_PARTS] == len(own)).all()
    assert len(parts) <= device.most(len(seq_lens))
    is_cut = parts[:, NUM_PARTS] > 1
    assert is_cut.sum() <= device.most_of_cut_contexts
    assert (is_cut[: is_cut.sum()]).all(), "cut ones come first: partial results are kept by their places"


def test_one_long_context_among_short_ones_is_shared_out() -> None:
    parts = parts_of(H200, [500] * 100 + [6_000])
    of_long = parts[parts[:, REQUEST] == 100]
    assert len(of_long) >= 5
    assert (of_long[:, END] - of_long[:, START]).max() <= 1_300
    assert len(parts) == 100 + len(of_long), "and nobody else is cut"


@pytest.mark.parametrize("num_requests", [60, 64, 66, 130, 256])
def test_even_contexts_of_many_requests_are_not_cut(num_requests: int) -> None:
    for length in (100, 1_000, 2_048, 2_112, 8_000):
        assert len(parts_of(H200, [length] * num_requests)) == num_requests


@given(devices, st.integers(1, 80), st.integers(1, 9_000))
def test_even_contexts_do_not_wait_for_each_other(device: ContextParts, num_requests: int, length: int) -> None:
    """No second round of programs where one would do."""
    if num_requests * device.num_heads <= device.num_programs:
        assert len(parts_of(device, [length] * num_requests)) * device.num_heads <= device.num_programs


def test_uneven_contexts_are_cut_even_if_some_have_to_wait() -> None:
    parts = parts_of(H200, [100] * 40 + [4_000] * 4)
    assert len(parts) * H200.num_heads > H200.num_programs
    assert (parts[:, END] - parts[:, START]).max() < 700


def test_a_single_context_takes_the_device() -> None:
    assert len(parts_of(H200, [400])) == 7
    assert len(parts_of(H200, [8_192])) == 32, "no more: one program adds them up"
