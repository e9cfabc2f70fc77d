"""The sampling kernel in every build: the same tokens as numpy, whatever the threads, and lines that end anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.native.lib import NativeLibrary, mask_logits, sample_tokens
from headway.runner import cpu_sampling
from headway.runner.sampler import RowRecord


def random_records(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    records = np.zeros(count, dtype=RowRecord)
    records["seed"] = rng.integers(0, 2**63, count, dtype=np.uint64)
    records["top_p"] = rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6], count)
    records["inverse_temperature"] = rng.choice([0.0, 1.0, 1.25, 3.0, 0.02], count)
    records["top_k"] = np.where(rng.random(count) < 0.5, 0, rng.integers(1, max(2, min(vocab, 1500)), count))
    records["min_p_offset"] = rng.choice([-np.inf, -np.inf, -3.0, 0.0], count)
    return records


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000, 2049, 5003])
def test_tokens_are_numpys(library: NativeLibrary, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    count = 60
    records = random_records(rng, count, vocab)
    lines = rng.normal(0.0, rng.choice([0.1, 3.0, 20.0], (count, 1)), (count, vocab)).astype(np.float32)
    lines[::4] = lines[::4].round()  # ties
    lines[5, rng.integers(0, vocab)] = np.nan
    lines[6, rng.integers(0, vocab)] = np.inf
    lines[7] = -np.inf
    lines[8:12, : vocab // 2] = -np.inf
    positions = rng.integers(1, 2**20, count)
    rows = rng.permutation(count)
    found = sample_tokens(torch.from_numpy(lines), rows, positions, records, library)
    expected = [
        cpu_sampling._sample_line(line, records[row], int(position))
        for line, row, position in zip(lines, rows, positions, strict=True)
    ]
    assert found.tolist() == expected


def test_tokens_do_not_depend_on_threads(fast: NativeLibrary) -> None:
    rng = np.random.default_rng(3)
    records = random_records(rng, 40, 3000)
    lines = torch.from_numpy(rng.normal(0.0, 3.0, (40, 3000)).astype(np.float32))
    before = fast.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2, 5):
            fast.set_num_threads(num_threads)
            found.append(sample_tokens(lines, np.arange(40), np.arange(40), records, fast).tolist())
    finally:
        fast.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_misuse_is_refused(fast: NativeLibrary) -> None:
    records = np.zeros(2, dtype=RowRecord)
    lines, places = torch.zeros(2, 5), np.arange(2)
    with pytest.raises(ValueError, match="float32"):
        sample_tokens(lines.double(), places, places, records, fast)
    with pytest.raises(ValueError, match="2 lines of logits for 1 rows"):
        sample_tokens(lines, places[:1], places, records, fast)
    with pytest.raises(ValueError, match="rows 0 to 2 of 2"):
        sample_tokens(lines, np.asarray([0, 2]), places, records, fast)
    with pytest.raises(ValueError, match="bytes"):
        sample_tokens(lines, places, places, np.zeros(2, dtype=np.float64), fast)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_masks_rule_out_what_they_do_not_allow(library: NativeLibrary, vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    logits = torch.from_numpy(generator.standard_normal((6, vocab)).astype(np.float32))
    logits[3, 0] = float("nan")
    lines = np.array([4, 0, 3], dtype=np.int32)
    words = generator.integers(-(2**31), 2**31, (3, -(-vocab // 32) + 1), dtype=np.int32)  # one word more than needed
    words[0], words[1] = 0, -1
    wanted = logits.numpy().copy()
    for line, mask in zip(lines, words, strict=True):
        for token in range(vocab):
            if not mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1:
                wanted[line, token] = -np.inf
    mask_logits(logits, lines, words, library)
    assert np.array_equal(logits.numpy(), wanted, equal_nan=True)


def test_masks_that_do_not_fit_are_refused(fast: NativeLibrary) -> None:
    logits, lines = torch.zeros(2, 40), np.array([1], dtype=np.int32)
    with pytest.raises(ValueError, match="masks of shape"):
        mask_logits(logits, lines, np.zeros((1, 1), dtype=np.int32), fast)
    with pytest.raises(ValueError, match="lines 2 to 2 of 2"):
        mask_logits(logits, lines + 1, np.zeros((1, 2), dtype=np.int32), fast)
