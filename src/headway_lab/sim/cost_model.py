"""The cost model: predicts how long a step takes from its work, as a sum of simple terms fitted to measured steps.

    steps that only decode                      steps with chunks of prompts
      constant   reading the weights              constant   the same, without a captured graph
      rows       one token each                   tokens     what each costs in the matrix products
                                                  sampled    rows that need logits and a token
                                                  chunks     pieces of prompts
    both
      context       keys and values that single tokens read
      chunk pairs   pairs of tokens that chunks compare
      moved blocks  KV blocks copied to or from the host, and within the device

Rows and tokens may cost more above certain numbers, where reading the weights no longer hides them. No coefficient is
negative, so a step with more work is never faster than another of its kind. The exception is a single row alone: many
devices have separate kernels for it, so its time is a fixed factor times what the terms say.

A model that is divided among several devices (`Ranks`) also waits for sums and logits to travel between them. That time
is not fitted: it is computed from the bytes that travel and from the speed of the link (`Link`).

Steps with the same work vary in time, because of other processes, clocks and caches. The mean is fitted, and the spread
of the measured steps around it is kept (`spread`), for a simulation to draw from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core import SchedulerOutput
from headway.core.step_work import STEP_KINDS, StepKind, StepWork
from headway.errors import ConfigError

ROW_KNEES = (0, 8, 32, 64, 128)
TOKEN_KNEES = (0, 32, 64, 128, 256, 512, 1024, 2048)
"""Above each of these numbers, a further token may cost more."""

TERMS = (
    "decode constant",
    *(f"rows over {knee}" for knee in ROW_KNEES),
    "chunk constant",
    *(f"tokens over {knee}" for knee in TOKEN_KNEES),
    "sampled",
    "chunks",
    "context",
    "chunk pairs",
    "moved blocks",
)
"""The names of the coefficients, in the order of `CostModel.coefficients`."""

_LEAST_STEPS = 20
_LEAST_LONE = 8  # steps with a single row, and others that decode
_OUTLIER = 3.0  # times slower than expected: something was compiled, or captured
_NUM_ROUNDS = 12  # of the fit, each weighing the steps by the error of the round before
_SMALL_DEVIATION = 0.02
_NUM_QUANTILES = 201  # of the spread; far apart, a single slow step would stretch the whole last part
_TABLE_SIZE = 4096


@dataclass(frozen=True)
class Link:
    """A link between two devices, used in both directions at once. By default about as fast as NVLink."""

    gb_s: float = 450.0
    latency_s: float = 8e-6

    def seconds(self, num_bytes: float) -> float:
        """Seconds from the first byte sent until the last byte has arrived."""
        return self.latency_s + num_bytes / (1e9 * self.gb_s)


@dataclass(frozen=True)
class Ranks:
    """Devices that have a part of every layer each, and what they send each other in a step: the sums of all parts
    after attention and after the MLP of every layer, and the logits at the end."""

    number: int = 1
    num_layers: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    value_bytes: int = 2
    """Bytes of an activation."""

    def seconds(self, work: StepWork, link: Link) -> float:
        """Seconds that a step spends on transfers."""
        if self.number == 1:
            return 0.0
        sums_s = 2 * self.num_layers * self._sum_s(work.num_tokens * self.hidden_size * self.value_bytes, link)
        logits = work.num_sampled * self.vocab_size * self.value_bytes
        return sums_s + (link.seconds(logits * (self.number - 1) / self.number) if logits else 0.0)

    def _sum_s(self, num_bytes: int, link: Link) -> float:
        """Seconds of a sum over all ranks: either each rank sends all its data to all others at once, or parts go round
        a ring twice, once to be added up and once to be distributed."""
        num_others = self.number - 1
        at_once_s = link.seconds(num_others * num_bytes)
        ring_s = 2 * num_others * link.seconds(num_bytes / self.number)
        return min(at_once_s, ring_s)


@dataclass(frozen=True)
class FitError:
    """|expected - measured| / measured of single steps."""

    kind: StepKind
    num_steps: int
    mean: float
    p95: float
    bias: float
    """(sum of expected - sum of measured) / sum of measured: the error that remains when errors of single steps cancel
    out."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> FitError:
        if document["kind"] not in STEP_KINDS:
            raise ValueError(f"{document['kind']!r} is no kind of step")
        numbers = {name: float(document[name]) for name in ("mean", "p95", "bias")}
        return FitError(document["kind"], int(document["num_steps"]), **numbers)


def fit_errors(seconds: Callable[[StepWork], float], steps: Sequence[tuple[StepWork, float]]) -> tuple[FitError, ...]:
    """The errors of a cost model on these steps; a kind of step that does not occur is left out."""
    return tuple(error for kind in STEP_KINDS if (error := _error_of(kind, seconds, steps)) is not None)


def _error_of(
    kind: StepKind, seconds: Callable[[StepWork], float], steps: Sequence[tuple[StepWork, float]]
) -> FitError | None:
    pairs = [(seconds(work), duration_s) for work, duration_s in steps if work.kind == kind]
    if not pairs:
        return None
    expected, measured = (np.array(side) for side in zip(*pairs, strict=True))
    errors = np.abs(expected - measured) / measured
    bias = float(expected.sum() / measured.sum() - 1.0)
    return FitError(kind, len(pairs), float(errors.mean()), float(np.quantile(errors, 0.95)), bias)


MeasuredStep = tuple[StepWork, float]
"""(what was in it, how many seconds it took)"""


@dataclass(frozen=True)
class CostModel:
    """Seconds for each term."""

    coefficients: tuple[float, ...]
    """Seconds for each of `TERMS`."""
    errors: tuple[FitError, ...] = ()
    """The errors by kind of step, on steps that were not used for the fit."""
    num_steps: int = 0
    spread: tuple[float, ...] = ()
    """Quantiles, evenly spaced, of measured over expected time; their mean is 1. Empty if steps do not vary."""
    lone_factor: float = 1.0
    """The time of a step with a single row and nothing else, divided by what the terms predict."""

    def __post_init__(self) -> None:
        if len(self.coefficients) != len(TERMS):
            raise ConfigError(f"A cost model has {len(TERMS)} coefficients, not {len(self.coefficients)}.")

    @classmethod
    def of_terms(cls, **seconds: float) -> CostModel:
        """A model from the terms that are not zero, e.g. `decode_constant=0.01`; underscores stand for spaces."""
        known = {term.replace(" ", "_"): place for place, term in enumerate(TERMS)}
        coefficients = [0.0] * len(TERMS)
        for name, value in seconds.items():
            coefficients[known[name]] = value
        return cls(tuple(coefficients))

    def step_s(self, output: SchedulerOutput) -> float:
        """Seconds that a planned step takes."""
        return self.seconds(StepWork.of(output))

    def seconds(self, work: StepWork) -> float:
        """Seconds that a step with this work takes."""
        sampled_s, chunk_s, context_s, pair_s, moved_s = self.coefficients[-5:]
        total = context_s * work.num_context_tokens
        if work.num_moved_blocks:
            total += moved_s * work.num_moved_blocks
        if not work.num_chunks:
            total += _look_up(self._row_seconds, work.num_tokens)
            return self.lone_factor * total if work.num_tokens == 1 else total
        total += sampled_s * work.num_sampled + chunk_s * work.num_chunks + pair_s * work.num_chunk_pairs
        return total + _look_up(self._token_seconds, work.num_tokens)

    @cached_property
    def _row_seconds(self) -> list[float]:
        """Seconds by number of rows, the constant included."""
        return _table(self.coefficients[: 1 + len(ROW_KNEES)], ROW_KNEES)

    @cached_property
    def _token_seconds(self) -> list[float]:
        return _table(self.coefficients[1 + len(ROW_KNEES) : -5], TOKEN_KNEES)

    def scaled(self, factor: float) -> CostModel:
        """A machine on which everything takes `factor` times as long."""
        return dataclasses.replace(self, coefficients=tuple(factor * c for c in self.coefficients))

    @property
    def mean_error(self) -> float:
        """Mean of |expected - measured| / measured over all steps that were not used for the fit."""
        num_steps = sum(error.num_steps for error in self.errors)
        return sum(error.num_steps * error.mean for error in self.errors) / num_steps if num_steps else 0.0

    def error_of(self, kind: StepKind) -> FitError | None:
        """The error on steps of this kind, if some were measured."""
        return next((error for error in self.errors if error.kind == kind), None)

    @classmethod
    def fit(cls, steps: Sequence[MeasuredStep], *, spread_of: Sequence[MeasuredStep] | None = None) -> CostModel:
        """Fit a model to measured steps. One step in five is left out of the fit and used to measure its error.
        `spread_of`: steps whose spread is kept, if not that of `steps`."""
        if len(steps) < _LEAST_STEPS:
            raise ConfigError(
                f"{len(steps)} measured steps are too few to fit a cost model; {_LEAST_STEPS} are the least."
            )
        fitted = [step for place, step in enumerate(steps) if place % 5]
        model = _fit_with_lone_rows(fitted)
        held_out = [step for step in steps[::5] if model._ratio(step) <= _OUTLIER]
        spread = _spread([ratio for step in spread_of or steps if (ratio := model._ratio(step)) <= _OUTLIER])
        errors = fit_errors(model.seconds, held_out)
        return dataclasses.replace(model, errors=errors, num_steps=len(steps), spread=spread)

    def _ratio(self, step: MeasuredStep) -> float:
        """Measured over expected seconds."""
        work, duration_s = step
        return duration_s / max(self.seconds(work), 1e-9)

    def as_json(self) -> dict[str, Any]:
        """The model with the names of its terms, so that a file with other terms is recognised."""
        return {
            "terms": dict(zip(TERMS, self.coefficients, strict=True)),
            "num_steps": self.num_steps,
            "errors": [error.as_json() for error in self.errors],
            "spread": list(self.spread),
            "lone_factor": self.lone_factor,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> CostModel:
        """Read what `as_json` made; `ValueError`, `KeyError` or `TypeError` for anything else."""
        terms = document["terms"]
        if tuple(terms) != TERMS:
            raise ValueError("its cost model has other terms than this version's; calibrate again")
        return cls(
            tuple(_seconds(terms[name], name) for name in TERMS),
            tuple(FitError.from_json(error) for error in document["errors"]),
            int(document["num_steps"]),
            tuple(_seconds(value, "spread") for value in document["spread"]),
            _seconds(document.get("lone_factor", 1.0), "lone_factor"),
        )


def _terms(work: StepWork) -> list[float]:
    rows, tokens = [0.0] * (1 + len(ROW_KNEES)), [0.0] * (1 + len(TOKEN_KNEES))
    if work.num_chunks:
        tokens = [1.0, *(float(max(work.num_tokens - knee, 0)) for knee in TOKEN_KNEES)]
    else:
        rows = [1.0, *(float(max(work.num_tokens - knee, 0)) for knee in ROW_KNEES)]
    num_sampled = work.num_sampled if work.num_chunks else 0
    counts = (num_sampled, work.num_chunks, work.num_context_tokens, work.num_chunk_pairs, work.num_moved_blocks)
    return [*rows, *tokens, *(float(count) for count in counts)]


def _fit_with_lone_rows(steps: Sequence[MeasuredStep]) -> CostModel:
    """Fit without steps of a single row if there are enough of them and of others. Single rows then have a separate
    factor."""
    lone = [(work, seconds) for work, seconds in steps if work.num_tokens == 1]
    others = [(work, seconds) for work, seconds in steps if work.num_tokens != 1]
    num_decodes = sum(not work.num_chunks for work, _ in others)
    if min(len(lone), num_decodes) < _LEAST_LONE:
        return CostModel(_fit(steps))
    model = CostModel(_fit(others))
    ratios = [ratio for step in lone if (ratio := model._ratio(step)) <= _OUTLIER]
    return dataclasses.replace(model, lone_factor=float(np.mean(ratios)) if ratios else 1.0)


def _fit(steps: Sequence[MeasuredStep]) -> tuple[float, ...]:
    """Fit the terms to relative errors, so that short steps are met as well as long ones. Their absolute values count,
    not their squares, so that a few slow steps do not bend the model. At the end everything is scaled so that the sums
    of expected and of measured times agree, since a simulation needs the mean. Much too slow steps are left out."""
    terms = np.array([_terms(work) for work, _ in steps])
    seconds = np.array([duration_s for _, duration_s in steps])
    expected = seconds
    coefficients = np.zeros(terms.shape[1])
    deviations = np.ones(len(steps))
    usual = np.ones(len(steps), dtype=bool)
    for _ in range(_NUM_ROUNDS):
        weights = np.where(usual, 1.0 / (expected * np.sqrt(np.maximum(deviations, _SMALL_DEVIATION))), 0.0)
        coefficients = non_negative_least_squares(terms * weights[:, None], seconds * weights)
        expected = np.maximum(terms @ coefficients, 0.1 * seconds)
        deviations = np.abs(seconds / expected - 1.0)
        usual = seconds <= _OUTLIER * expected
    scale = float(np.sum(seconds[usual] / expected[usual]) / max(usual.sum(), 1))
    return tuple(scale * float(c) for c in coefficients)


def non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with the least |matrix x - target|."""
    from scipy.optimize import nnls

    # The solver's tolerance is absolute, and terms are counts from 1 to millions of pairs.
    scale, unit = np.maximum(np.abs(matrix).max(0), 1e-300), max(float(np.abs(target).max()), 1e-300)
    return np.asarray(nnls(matrix / scale, target / unit, maxiter=30 * matrix.shape[1])[0] * unit / scale)


def _spread(ratios: Sequence[float]) -> tuple[float, ...]:
    quantiles: NDArray[np.float64] = np.quantile(ratios, np.linspace(0.0, 1.0, _NUM_QUANTILES))
    # Values are drawn from the lines between the quantiles: their mean is that of the lines' middles.
    mean = float(np.mean((quantiles[1:] + quantiles[:-1]) / 2))
    return tuple(float(quantile / mean) for quantile in quantiles)


def _table(coefficients: Sequence[float], knees: Sequence[int]) -> list[float]:
    """Seconds by number, from (constant, one coefficient for each knee)."""
    constant, *rest = coefficients
    pairs = list(zip(knees, rest, strict=True))
    return [constant + sum(c * (n - knee) for knee, c in pairs if n > knee) for n in range(_TABLE_SIZE)]


def _look_up(table: list[float], place: int) -> float:
    """Look up a number's seconds. Beyond its end the table continues as a straight line."""
    last = _TABLE_SIZE - 1
    return table[place] if place <= last else table[last] + (place - last) * (table[last] - table[last - 1])


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r}, not a number that is not negative")
    return float(value)
