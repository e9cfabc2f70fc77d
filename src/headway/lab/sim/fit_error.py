"""How far a cost model is off on steps that it was not fitted to, by kind of step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headway.lab.sim.step_work import STEP_KINDS, StepKind, StepWork


@dataclass(frozen=True)
class FitError:
    """|expected - measured| / measured of single steps."""

    kind: StepKind
    num_steps: int
    mean: float
    p95: float
    bias: float
    """(sum of expected - sum of measured) / sum of measured: what is left when errors of single steps cancel out."""

    def as_json(self) -> dict[str, Any]:
        """For the calibration's file."""
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> FitError:
        """What `as_json` made."""
        if document["kind"] not in STEP_KINDS:
            raise ValueError(f"{document['kind']!r} is no kind of step")
        numbers = {name: float(document[name]) for name in ("mean", "p95", "bias")}
        return FitError(document["kind"], int(document["num_steps"]), **numbers)


def fit_errors(seconds: Callable[[StepWork], float], steps: Sequence[tuple[StepWork, float]]) -> tuple[FitError, ...]:
    """Of a cost model on these steps; a kind that does not occur is left out."""
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
