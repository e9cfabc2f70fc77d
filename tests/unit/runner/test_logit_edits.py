"""Which edits of single logits count at which length of an answer."""

from __future__ import annotations

import numpy as np
import pytest

from headway.runner.logit_edits import EditTable
from headway.sampling_params import SamplingParams

END = 7


def edited(params: SamplingParams, num_output_tokens: int) -> list[int]:
    """The tokens whose logits are changed."""
    table = EditTable([END])
    edits = table.of(params)
    if edits is None:
        return []
    table.seat(3, edits)
    entries = table.entries(np.array([3]), [0], [num_output_tokens])
    return [] if entries is None else entries.columns[1].tolist()


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [
        ({}, [], []),
        ({"min_tokens": 2}, [END], []),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5]}, [5], []),
        ({"min_tokens": 2, "logit_bias": {9: 1.0}}, [9, END], [9]),
    ],
    ids=str,
)
def test_an_end_is_barred_until_an_answer_has_min_tokens(
    fields: dict[str, object], before: list[int], after: list[int]
) -> None:
    params = SamplingParams(max_tokens=9, **fields)  # type: ignore[arg-type]
    assert [edited(params, number) for number in range(4)] == [before, before, after, after]
