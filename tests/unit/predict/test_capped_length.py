"""The expected length under a limit, against a simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from headway.predict.predictors import expected_length


@pytest.mark.parametrize("max_tokens", [20, 100, 512, None])
def test_mean_of_the_cut_distribution(max_tokens: int | None) -> None:
    samples = np.exp(np.random.default_rng(0).normal(4.5, 0.8, 400_000))
    mean = np.minimum(samples, max_tokens or np.inf).mean()
    assert expected_length(4.5, 0.8, max_tokens) == pytest.approx(mean, rel=0.01)


def test_the_order_stays_beyond_the_limit() -> None:
    lengths = [expected_length(log_length, 0.8, 100) for log_length in np.linspace(2, 7, 50)]
    assert all(a < b for a, b in itertools.pairwise(lengths))
    assert lengths[-1] <= 100


def test_bounds() -> None:
    assert expected_length(-50.0, 0.0, 10) == 1
    assert expected_length(1e9, 0.5, 16) == 16
    assert math.isfinite(expected_length(1e9, 0.5, None))
