"""How long a step takes, from what is in it: a sum of simple terms, fitted to measured steps.

    constant       launches, norms, reading the weights
    tokens         what every token costs in the matrix products; more from certain numbers on, where reading the
                   weights no longer hides it
    context        keys and values that single tokens read: one for each token of their contexts
    chunk pairs    pairs of tokens that chunks of prompts compare
    rows           requests in the step
    moved blocks   KV blocks copied to or from the host, and within the device

No coefficient is negative, so a step with more in it is never faster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core import SchedulerOutput
from headway.errors import ConfigError

FORMAT = 1
TOKEN_KNEES = (0, 32, 64, 128, 256, 512, 1024, 2048)
"""From each of these numbers of tokens on, another one may cost more."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What counts about a step."""

    num_tokens: int
    num_rows: int
    num_context_tokens: int
    num_chunk_pairs: float
    num_moved_blocks: int

    @staticmethod
    def of(output: SchedulerOutput) -> StepWork:
        """Of a planned step."""
        context, pairs = 0, 0.0
        for share in output.scheduled:
            num_tokens = share.num_tokens
            if num_tokens == 1:
                context += share.num_computed_tokens + 1
            else:
                pairs += num_tokens * (share.num_computed_tokens + 0.5 * num_tokens)
        moves = output.moves
        num_moved = len(moves.moved_out) + len(moves.copied) + len(moves.moved_in)
        return StepWork(output.num_scheduled_tokens, len(output.scheduled), context, pairs, num_moved)

    def terms(self) -> list[float]:
        """One for each coefficient."""
        tokens = [float(max(self.num_tokens - knee, 0)) for knee in TOKEN_KNEES]
        return [1.0, *tokens, self.num_context_tokens, self.num_chunk_pairs, self.num_rows, self.num_moved_blocks]


@dataclass(frozen=True)
class CostModel:
    """Seconds for each term."""

    coefficients: tuple[float, ...]
    machine: str = ""
    """What it was fitted on, for people."""
    mean_error: float = 0.0
    """Mean of |predicted - measured| / measured over steps that were not fitted."""
    num_steps: int = 0

    def step_s(self, output: SchedulerOutput) -> float:
        """What a planned step takes."""
        return self.seconds(StepWork.of(output))

    def seconds(self, work: StepWork) -> float:
        """What a step with so much work takes."""
        num_tokens = work.num_tokens
        total, *rest = self.coefficients
        for knee, coefficient in zip(TOKEN_KNEES, rest):
            if num_tokens <= knee:
                break
            total += coefficient * (num_tokens - knee)
        context, pairs, rows, moved = rest[len(TOKEN_KNEES) :]
        total += context * work.num_context_tokens + pairs * work.num_chunk_pairs
        return total + rows * work.num_rows + moved * work.num_moved_blocks

    @staticmethod
    def fit(steps: Sequence[tuple[StepWork, float]], *, machine: str = "") -> CostModel:
        """From measured steps. One in five is left out of the fit and says how good it is."""
        if len(steps) < 20:
            raise ConfigError(f"{len(steps)} measured steps are too few to fit a cost model; 20 are the least.")
        fitted = [step for place, step in enumerate(steps) if place % 5]
        held_out = steps[::5]
        terms = np.array([work.terms() for work, _ in fitted])
        seconds = np.array([duration_s for _, duration_s in fitted])
        # Relative errors count: a short step is predicted as well as a long one.
        coefficients = _least_squares(terms / seconds[:, None], np.ones(len(fitted)))
        model = CostModel(tuple(float(c) for c in coefficients), machine=machine, num_steps=len(steps))
        errors = [abs(model.seconds(work) - duration_s) / duration_s for work, duration_s in held_out]
        return CostModel(model.coefficients, machine, float(np.mean(errors)), len(steps))

    def save(self, path: str | Path) -> None:
        """As JSON."""
        document = {"format": FORMAT, "token_knees": TOKEN_KNEES, **asdict(self)}
        Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> CostModel:
        """What `save` wrote; `ConfigError` if it is something else."""
        try:
            document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"Cannot read the calibration '{path}': {error}.") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConfigError(f"'{path}' is no calibration of this version (format {FORMAT}).")
        coefficients = document.get("coefficients", ())
        if tuple(document.get("token_knees", ())) != TOKEN_KNEES or len(coefficients) != len(TOKEN_KNEES) + 5:
            raise ConfigError(f"The calibration '{path}' has other terms than this version; calibrate again.")
        return CostModel(
            tuple(float(c) for c in coefficients),
            str(document.get("machine", "")),
            float(document.get("mean_error", 0.0)),
            int(document.get("num_steps", 0)),
        )


def _least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with the least |matrix x - target|: one coordinate after the other, until nothing changes."""
    scale = np.maximum(np.abs(matrix).max(0), 1e-300)
    scaled = matrix / scale
    gram, right = scaled.T @ scaled, scaled.T @ target
    x = np.zeros(matrix.shape[1])
    for _ in range(20_000):
        before = x.copy()
        for place in range(len(x)):
            if gram[place, place] > 0:
                slack = right[place] - gram[place] @ x + gram[place, place] * x[place]
                x[place] = max(slack / gram[place, place], 0.0)
        if np.abs(x - before).max() <= 1e-12 * max(np.abs(x).max(), 1e-300):
            break
    return x / scale
