"""How good predictions are: by the order they put requests in, and by how far off the lengths are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PairCounts:
    """Of all pairs of requests: how many the prediction orders as the truth does."""

    concordant: int
    discordant: int
    tied_truth: int
    """Equally long in truth; `tied_both` among them."""
    tied_prediction: int
    tied_both: int

    @property
    def kendall_tau(self) -> float:
        """Tau-b: 1 the same order, 0 no relation, -1 the reverse; ties on either side are allowed for."""
        total = self._num_comparable + self.tied_truth
        scale = math.sqrt((total - self.tied_truth) * (total - self.tied_prediction))
        return (self.concordant - self.discordant) / scale if scale else 0.0

    @property
    def accuracy(self) -> float:
        """Share of pairs of different lengths that are ordered right; one that is predicted equal is half right."""
        half = (self.tied_prediction - self.tied_both) / 2
        return (self.concordant + half) / self._num_comparable if self._num_comparable else 0.5

    @property
    def _num_comparable(self) -> int:
        return self.concordant + self.discordant + self.tied_prediction - self.tied_both


def count_pairs(predicted: Sequence[float], actual: Sequence[float]) -> PairCounts:
    """In O(n log n): sorted by the truth, every prediction asks how many before it are smaller or greater."""
    ranks = {value: rank for rank, value in enumerate(sorted(set(predicted)), 1)}
    pairs = sorted((truth, ranks[guess]) for guess, truth in zip(predicted, actual, strict=True))
    seen = _Fenwick(len(ranks))
    concordant = discordant = start = 0
    while start < len(pairs):
        end = start
        while end < len(pairs) and pairs[end][0] == pairs[start][0]:
            concordant += seen.sum_to(pairs[end][1] - 1)
            discordant += start - seen.sum_to(pairs[end][1])
            end += 1
        for _, rank in pairs[start:end]:
            seen.add(rank)
        start = end
    return PairCounts(
        concordant=concordant,
        discordant=discordant,
        tied_truth=_num_ties(truth for truth, _ in pairs),
        tied_prediction=_num_ties(rank for _, rank in pairs),
        tied_both=_num_ties(pairs),
    )


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one predictor on some requests."""

    kendall_tau: float
    accuracy: float
    """Of the order of pairs."""
    log_error: float
    """Mean absolute difference of the logarithms: 0.69 is a factor of two."""
    bias: float
    """Sum of the predicted lengths over the sum of the true ones."""


def quality(predicted: Sequence[float], actual: Sequence[float]) -> Quality:
    pairs = count_pairs(predicted, actual)
    guesses, truths = np.maximum(np.asarray(predicted, float), 1), np.maximum(np.asarray(actual, float), 1)
    return Quality(
        kendall_tau=pairs.kendall_tau,
        accuracy=pairs.accuracy,
        log_error=float(np.abs(np.log(guesses) - np.log(truths)).mean()),
        bias=float(guesses.sum() / truths.sum()),
    )


def _num_ties(values: Iterable[object]) -> int:
    """Pairs of equal values."""
    return sum(count * (count - 1) // 2 for count in Counter(values).values())


class _Fenwick:
    """Counts by rank, from 1, with sums of all up to a rank in O(log n)."""

    def __init__(self, size: int) -> None:
        self._counts = [0] * (size + 1)

    def add(self, rank: int) -> None:
        while rank < len(self._counts):
            self._counts[rank] += 1
            rank += rank & -rank

    def sum_to(self, rank: int) -> int:
        total = 0
        while rank:
            total += self._counts[rank]
            rank &= rank - 1
        return total
