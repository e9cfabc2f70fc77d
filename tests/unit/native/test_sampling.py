"""The sampling kernels' own bounds. What they choose, in every build, is tested in `tests/unit/runner`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.native.lib import NativeLibrary, mask_logits, sample_tokens
from headway.runner.sampler import RowRecord


def test_tokens_do_not_depend_on_threads(fast: NativeLibrary) -> None:
    rng = np.random.default_rng(3)
    records = np.zeros(40, dtype=RowRecord)
    records["seed"], records["inverse_temperature"] = np.arange(40), 1.25
    records["top_p"], records["top_k"] = np.where(np.arange(40) % 2, 0.9, 1.0), np.arange(40) % 4 * 300
    lines = torch.from_numpy(rng.normal(0.0, 3.0, (40, 3000)).astype(np.float32))
    found = []
    for num_threads in (1, 2, 5):
        fast.set_num_threads(num_threads)
        found.append(sample_tokens(lines, np.arange(40), np.arange(40), records, fast).tolist())
    assert found[0] == found[1] == found[2]


def test_misuse_is_refused(fast: NativeLibrary) -> None:
    records = np.zeros(2, dtype=RowRecord)
    lines, places = torch.zeros(2, 5), np.arange(2)
    for logits, rows, table, message in (
        (lines.double(), places, records, "float32"),
        (lines, np.asarray([0, 2]), records, "rows 0 to 2 of 2"),
        (lines, places, np.zeros(2, dtype=np.float64), "bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_tokens(logits, rows, places, table, fast)
    with pytest.raises(ValueError, match="2 lines of logits for 1 rows"):
        sample_tokens(lines, places[:1], places, records, fast)
    with pytest.raises(ValueError, match="masks of shape"):
        mask_logits(torch.zeros(2, 40), np.array([1], dtype=np.int32), np.zeros((1, 1), dtype=np.int32), fast)
    with pytest.raises(ValueError, match="lines 2 to 2 of 2"):
        mask_logits(torch.zeros(2, 40), np.array([2], dtype=np.int32), np.zeros((1, 2), dtype=np.int32), fast)
