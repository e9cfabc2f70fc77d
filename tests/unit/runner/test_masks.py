"""Masks of guided rows: what they rule out is never chosen, and everything else is chosen as if it were not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.runner.logit_edits import LineMasks
from headway.runner.step_runner import _line_masks
from headway.structured.guides import TokenMasks
from tests.unit.runner.sampling_bench import EVERY_BUILD, Bench, random_logits, random_request, sample_once

FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "filtered": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "biased": {"temperature": 0.0, "logit_bias": {5: 50.0, 6: -100.0}},
    "with logprobs": {"logprobs": 2},
}


def mask_of(allowed: np.ndarray, num_words: int) -> np.ndarray:
    """The words of one line; `allowed` is bool [V]."""
    flags = np.zeros(num_words * 32, dtype=np.uint8)
    flags[: len(allowed)] = allowed
    return np.packbits(flags, bitorder="little").view(np.int32)


CASES = [*((name, 2111) for name in FIELDS), ("greedy", 1), ("drawn", 31), ("filtered", 32), ("penalised", 33)]


@pytest.mark.parametrize("kernels", EVERY_BUILD)
@pytest.mark.parametrize(("name", "vocab_size"), CASES)
def test_a_mask_is_minus_infinity(kernels: str, name: str, vocab_size: int) -> None:
    fields = FIELDS[name]
    rng = np.random.default_rng(vocab_size)
    requests = [random_request(rng, vocab_size, **fields) for _ in range(6)]
    logits = random_logits(rng, len(requests), vocab_size)
    allowed = rng.random((len(requests), vocab_size)) < 0.1
    allowed[:, vocab_size - 1] = True
    if name != "with logprobs":
        logits[0][torch.from_numpy(~allowed[0])] = torch.nan
    masked_lines = [5, 0, 3]
    num_words = -(-vocab_size // 32) + 2  # a tokenizer may know more tokens than the model
    masks = LineMasks(
        np.asarray(masked_lines, dtype=np.int32), np.stack([mask_of(allowed[line], num_words) for line in masked_lines])
    )
    by_hand = logits.clone()
    for line in masked_lines:
        by_hand[line][torch.from_numpy(~allowed[line])] = -torch.inf
    expected = sample_once(kernels, by_hand, [request.copy() for request in requests])
    found = sample_once(kernels, logits, [request.copy() for request in requests], masks)
    assert found.token_ids == expected.token_ids
    assert all(allowed[line, found.token_ids[line]] for line in masked_lines)
    if "logprobs" in fields:  # they are the model's own
        plain = sample_once(kernels, logits, [request.copy() for request in requests])
        for line, record in enumerate(found.logprobs):
            assert record is not None
            assert record.top_ids == plain.logprobs[line].top_ids  # type: ignore[union-attr]


@pytest.mark.parametrize("kernels", EVERY_BUILD)
def test_a_mask_that_allows_nothing_fails_its_row_alone(kernels: str) -> None:
    rng = np.random.default_rng(3)
    requests = [random_request(rng, 90) for _ in range(3)]
    logits = random_logits(rng, 3, 90)
    masks = LineMasks(np.asarray([1], dtype=np.int32), np.zeros((1, 3), dtype=np.int32))
    plain = sample_once(kernels, logits, [request.copy() for request in requests])
    found = sample_once(kernels, logits, requests, masks)
    assert set(found.errors) == {1} and "masks" in found.errors[1]
    assert (found.token_ids[0], found.token_ids[2]) == (plain.token_ids[0], plain.token_ids[2])


@pytest.mark.parametrize("kernels", EVERY_BUILD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_changes_the_next_step_only_by_its_token(kernels: str, dtype: torch.dtype) -> None:
    """Rows keep nothing of a mask."""
    rng = np.random.default_rng(4)
    bench = Bench(kernels, 2, 70)
    bench.add({row: random_request(rng, 70, temperature=0.0) for row in range(2)})
    logits = random_logits(rng, 2, 70).to(dtype)
    only = np.zeros(70, dtype=bool)
    only[33] = True
    masks = LineMasks(np.asarray([0], dtype=np.int32), mask_of(only, 3)[None])
    assert bench.sample(logits, [0, 1], masks=masks).token_ids[0] == 33
    assert bench.sample(logits, [0, 1]).token_ids == logits.float().argmax(1).tolist()


def test_a_request_that_is_not_in_the_step_takes_its_masks_along() -> None:
    """Also where a guided request could not enter."""
    bits = np.arange(4, dtype=np.uint32)[:, None]
    masks = TokenMasks(("a", "gone", "b"), (1, 2, 1), bits)
    found = _line_masks(masks, ["free", "b", "a"], None)
    assert found is not None
    assert dict(zip(found.lines.tolist(), found.words[:, 0].tolist(), strict=True)) == {2: 0, 1: 3}
    assert _line_masks(masks, ["free"], None) is None
