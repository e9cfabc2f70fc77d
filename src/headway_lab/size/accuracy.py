"""How far predictions from a data sheet are off, measured where the truth is known: on machines that were calibrated.

Two comparisons. Single steps: what the formula says against what a shipped calibration says, for steps of many sizes.
Whole scenarios (`b1`, `b64`, `nano`, `prefill` of docs/benchmarks.md): a simulation by data sheet against the measured
row. `benchmarks/data_sheet_shares.py` does both and writes `data_sheet_errors.json`, which `headway size` reads.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from headway.config import EngineConfig
from headway.core.step_work import StepWork
from headway.errors import ConfigError
from headway_lab.bench.offline_bench import SCENARIOS
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.cost_model import fit_errors
from headway_lab.sim.simulate import simulate
from headway_lab.size.data_sheet_model import MEASURED, Shares, data_sheet_calibration
from headway_lab.size.data_sheets import DataSheet, device_calibrated_as

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (256, 1024, 4096)
_BESIDE = (0, 16, 64)
_CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)


def compared_steps(num_cache_tokens: int) -> list[StepWork]:
    """Steps of many sizes that fit into the cache."""
    steps = [
        StepWork(rows, rows, rows, rows * context)
        for rows in _ROWS
        for context in _CONTEXTS
        if rows * context <= num_cache_tokens
    ]
    for beside in _BESIDE:
        for tokens in _CHUNKS:
            context = beside * 512
            steps.append(StepWork(beside + tokens, beside + 1, beside + 1, context, 1, tokens * tokens / 2))
    return steps


@dataclass(frozen=True)
class StepErrors:
    """The errors of single steps on one calibrated machine."""

    machine: str
    kind: str
    num_steps: int
    mean: float
    """Mean of |predicted - calibrated| / calibrated."""
    p95: float
    bias: float
    was_fitted: bool
    """Whether the shares were fitted to this machine."""


@dataclass(frozen=True)
class RowError:
    """A measured row, and the same by simulation."""

    model: str
    quantization: str
    scenario: str
    key: str
    measured: float
    predicted: float
    was_fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class Accuracy:
    steps: Sequence[StepErrors]
    rows: Sequence[RowError]

    @property
    def held_out_rows(self) -> list[RowError]:
        return [row for row in self.rows if not row.was_fitted]

    @property
    def mean_step_error(self) -> float:
        """Over the steps of machines to which nothing was fitted."""
        held_out = [one for one in self.steps if not one.was_fitted]
        return sum(one.mean * one.num_steps for one in held_out) / sum(one.num_steps for one in held_out)

    @property
    def largest_row_error(self) -> float:
        """|error| of the row that is furthest off, of those to which nothing was fitted."""
        return max(abs(row.error) for row in self.held_out_rows)

    @property
    def note(self) -> str:
        """A sentence for an answer by data sheet."""
        held_out = {one.machine for one in self.steps if not one.was_fitted}
        rows = self.held_out_rows
        p95 = max(one.p95 for one in self.steps if not one.was_fitted)
        models = ", ".join(dict.fromkeys(_model_text(row) for row in rows))
        mean = statistics.fmean(abs(row.error) for row in rows)
        return (
            "By data sheet. Where it could be checked, on models and formats that its shares were not fitted to: "
            f"single steps of {len(held_out)} calibrated machines {self.mean_step_error:.0%} off in the mean (95% "
            f"within {p95:.0%}); {len(rows)} measured rows of {models} {mean:.0%} in the mean, "
            f"{self.largest_row_error:.0%} at most. All of these are H200s; other devices were not measured."
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": [asdict(one) for one in self.steps],
            "rows": [{**asdict(row), "error": row.error} for row in self.rows],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Accuracy:
        """Read what `as_json` made."""
        rows = [{name: value for name, value in row.items() if name != "error"} for row in document["rows"]]
        return Accuracy([StepErrors(**one) for one in document["steps"]], [RowError(**row) for row in rows])


ERRORS_FILE = Path(str(files("headway_lab.size") / "data_sheet_errors.json"))


def measured_accuracy() -> Accuracy:
    """The accuracy that was measured last."""
    return Accuracy.from_json(json.loads(ERRORS_FILE.read_text(encoding="utf-8")))


def shape_config(model: str, **options: Any) -> EngineConfig:
    """The options of an engine on a GPU for a shape without weights."""
    given = {"model": model, "load_format": "dummy", "device": "cuda", "dtype": "bfloat16", **options}
    return EngineConfig.from_options(**given)


def config_of(calibration: Calibration) -> EngineConfig:
    """The options of a calibrated engine, as far as its costs depend on them."""
    weights, is_quantized, _ = calibration.dtype.partition(" weights, ")
    return shape_config(
        calibration.model,
        quantization=weights if is_quantized else "auto",
        max_model_len=calibration.max_model_len,
        tensor_parallel_size=calibration.tensor_parallel_size,
        kv_cache_dtype="auto" if calibration.kv_dtype == "bfloat16" else calibration.kv_dtype,
    )


def step_errors(
    name: str, calibration: Calibration, *, was_fitted: bool = False, shares: Shares = MEASURED
) -> list[StepErrors]:
    """The errors by kind of step on a calibrated machine; `ConfigError` if the device is not known."""
    sheet = device_calibrated_as(calibration.device_name)
    if sheet is None:
        raise ConfigError(f"There is no data sheet of '{calibration.device_name}'.")
    predicted, _ = data_sheet_calibration(config_of(calibration), sheet, shares=shares)
    works = compared_steps(calibration.num_blocks * calibration.block_size)
    measured = [(work, calibration.cost.seconds(work)) for work in works]
    return [
        StepErrors(name, one.kind, one.num_steps, one.mean, one.p95, one.bias, was_fitted)
        for one in fit_errors(predicted.cost.seconds, measured)
    ]


@dataclass(frozen=True)
class MeasuredRow:
    """A row of docs/results."""

    model: str
    quantization: str
    scenario: str
    key: str
    """`ms_per_token`, `output_tok_s` or `input_tok_s`."""
    value: float
    was_fitted: bool = False


def row_error(row: MeasuredRow, sheet: DataSheet, shares: Shares = MEASURED) -> RowError:
    """Simulate the scenario of a row by data sheet."""
    scenario = SCENARIOS[row.scenario]
    config = shape_config(
        row.model,
        quantization=row.quantization,
        max_model_len=scenario.max_model_len,
        enable_prefix_caching=False,
    )
    calibration, _ = data_sheet_calibration(config, sheet, shares=shares)
    work = scenario.draw(0, calibration.vocab_size)
    setup = calibration.scheduler_settings(), calibration.cache_settings()
    done = simulate(work, calibration.machine(), *setup, seed=None)
    if row.key == "ms_per_token":
        times = done.timelines[0].token_times_s
        predicted = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
    else:
        side = "num_output_tokens" if row.key == "output_tok_s" else "num_prompt_tokens"
        predicted = sum(getattr(request, side) for request in work) / done.duration_s
    assert math.isfinite(predicted)
    return RowError(row.model, row.quantization, row.scenario, row.key, row.value, predicted, row.was_fitted)


def _model_text(row: RowError) -> str:
    return row.model if row.quantization in ("auto", "none") else f"{row.model} in {row.quantization.upper()}"
