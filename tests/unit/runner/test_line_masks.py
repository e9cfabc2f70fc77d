"""Which line of a step gets which mask, also where a guided request could not enter."""

from __future__ import annotations

import numpy as np

from headway.runner.step_runner import _line_masks
from headway.structured.guides import TokenMasks


def test_a_request_that_is_not_in_the_step_takes_its_masks_along() -> None:
    bits = np.arange(4, dtype=np.uint32)[:, None]
    masks = TokenMasks(("a", "gone", "b"), (1, 2, 1), bits)
    found = _line_masks(masks, ["free", "b", "a"], None)
    assert found is not None
    assert dict(zip(found.lines.tolist(), found.words[:, 0].tolist(), strict=True)) == {2: 0, 1: 3}
    assert _line_masks(masks, ["free"], None) is None
