"""What the engine reaches of a device's data sheet, and how far predictions from a data sheet are off.

    python benchmarks/data_sheet_shares.py --fit    # the shares, fitted to Llama 3.1 8B in bfloat16 on an H200
    python benchmarks/data_sheet_shares.py          # the errors, and src/headway_lab/size/data_sheet_errors.json
    python benchmarks/data_sheet_shares.py --output errors.json --markdown

The fit sees the calibration `h200-llama31-8b` and the rows of `b1`, `b64` and `prefill` below. Everything else is held
out: the calibrations of other ranks and models, and the rows of 0.6B and of FP8 weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from headway.console.output_files import write_json
from headway.core.step_work import StepWork
from headway.worker.memory_needs import planned_model
from headway_lab.sim.calibration import Calibration, shipped_machines
from headway_lab.size.accuracy import (
    ERRORS_FILE,
    Accuracy,
    MeasuredRow,
    compared_steps,
    config_of,
    row_error,
    shape_config,
    step_errors,
)
from headway_lab.size.data_sheet_model import MEASURED, RankCosts, Shares, data_sheet_seconds, rank_costs
from headway_lab.size.data_sheets import find_device

FITTED_MACHINE = "h200-llama31-8b"
FITTED_SHARES = (
    *("weights", "cache", "matmul", "attention"),
    *("layer_s", "lone_layer_s", "chunk_layer_s", "step_s"),
)
_ROW_WEIGHT = 0.5
"""Of a row in the fit; all steps of the calibration together weigh 1."""

_ONE = StepWork(1, 1, 1, 256)
_SIXTY_FOUR = StepWork(64, 64, 64, 64 * 256)
_PROMPTS = StepWork(4 * 2048, 4, 4, 0, 4, 4 * 2048 * 1024)

FITTED_STEPS = (
    # docs/results/h200/second_round.md and RESULTS.md (c5c68fc): b1, b64 (a step), prefill (43,905 tokens a second)
    (1, _ONE, 3.87e-3),
    (1, _SIXTY_FOUR, 5.30e-3),
    (1, _PROMPTS, 8192 / 43_905),
    # docs/results/tensor_parallel.md (8097638): b1 and b64 of one rank of two, and of four
    (2, _ONE, 2.23e-3),
    (2, _SIXTY_FOUR, 3.12e-3),
    (4, _ONE, 1.45e-3),
    (4, _SIXTY_FOUR, 2.14e-3),
)
"""(ranks of Llama 3.1 8B, work, measured seconds)"""

ROWS = (
    # benchmarks/RESULTS.md, c5c68fc (bfloat16), dd46a74 (prefill in FP8), docs/results/quantization.md
    MeasuredRow("qwen3-0.6b", "auto", "b1", "ms_per_token", 0.77),
    MeasuredRow("qwen3-0.6b", "auto", "b64", "output_tok_s", 40_990),
    MeasuredRow("qwen3-0.6b", "auto", "nano", "output_tok_s", 27_586),
    MeasuredRow("qwen3-0.6b", "auto", "prefill", "input_tok_s", 432_853),
    MeasuredRow("llama31-8b", "fp8", "b1", "ms_per_token", 2.54),
    MeasuredRow("llama31-8b", "fp8", "b64", "output_tok_s", 15_833),
    MeasuredRow("llama31-8b", "fp8", "nano", "output_tok_s", 13_804),
    MeasuredRow("llama31-8b", "fp8", "prefill", "input_tok_s", 72_527),
    MeasuredRow("llama31-8b", "auto", "b1", "ms_per_token", 3.87, was_fitted=True),
    MeasuredRow("llama31-8b", "auto", "b64", "output_tok_s", 11_005, was_fitted=True),
    MeasuredRow("llama31-8b", "auto", "nano", "output_tok_s", 10_497),
    MeasuredRow("llama31-8b", "auto", "prefill", "input_tok_s", 43_905, was_fitted=True),
    MeasuredRow("llama31-8b", "int4", "b1", "ms_per_token", 2.44, was_fitted=True),
    MeasuredRow("llama31-8b", "int4", "b64", "output_tok_s", 12_855),
    MeasuredRow("llama31-8b", "int4", "prefill", "input_tok_s", 42_272),
)
SHEET = find_device("h200")


def measure() -> Accuracy:
    """Both comparisons, with the shares as they are in the code."""
    steps = []
    for name, path in shipped_machines().items():
        steps += step_errors(name, Calibration.load(path), was_fitted=name == FITTED_MACHINE)
    return Accuracy(steps, [row_error(row, SHEET) for row in ROWS])


def fitted() -> Shares:
    """The shares that fit best."""
    from scipy.optimize import least_squares

    calibration = Calibration.find(FITTED_MACHINE)
    ranks = {number: _rank(number) for number in (1, 2, 4)}
    whole = rank_costs(planned_model(config_of(calibration)), "none")
    works = compared_steps(calibration.num_blocks * calibration.block_size)
    start = np.array([getattr(MEASURED, name) for name in FITTED_SHARES])

    def errors(scale: Sequence[float]) -> list[float]:
        shares = dataclasses.replace(MEASURED, **dict(zip(FITTED_SHARES, map(float, scale * start), strict=True)))
        weight = 1.0 / math.sqrt(len(works))
        found = [
            weight * math.log(data_sheet_seconds(work, whole, SHEET, shares) / calibration.cost.seconds(work))
            for work in works
        ]
        for number, work, seconds in FITTED_STEPS:
            found.append(_ROW_WEIGHT * math.log(data_sheet_seconds(work, ranks[number], SHEET, shares) / seconds))
        return found

    found = least_squares(errors, np.ones(len(start)), bounds=(0.01, 50.0), loss="soft_l1", f_scale=0.1)
    values = [float(f"{value:.3g}") for value in found.x * start]
    return dataclasses.replace(MEASURED, **dict(zip(FITTED_SHARES, values, strict=True)))


def _rank(number: int) -> RankCosts:
    config = shape_config("llama31-8b", tensor_parallel_size=number, max_model_len=4096)
    return rank_costs(planned_model(config), "none")


def markdown(accuracy: Accuracy) -> str:
    """Both tables."""
    lines = [
        "| calibrated machine | steps | number | mean error | 95% within | of the sum |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for one in accuracy.steps:
        name = f"{one.machine} (fitted)" if one.was_fitted else one.machine
        lines.append(f"| {name} | {one.kind} | {one.num_steps} | {one.mean:.1%} | {one.p95:.1%} | {one.bias:+.1%} |")
    lines += ["", "| model | weights | scenario | | measured | predicted | error |", "|---|---|---|---|--:|--:|--:|"]
    for row in accuracy.rows:
        weights = "bf16" if row.quantization == "auto" else row.quantization
        error = f"{row.error:+.1%}" + (" (fitted)" if row.was_fitted else "")
        cells = row.model, weights, row.scenario, row.key, f"{row.measured:,g}", f"{row.predicted:,.4g}", error
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="Fit the shares, and print them.")
    parser.add_argument("--output", default=str(ERRORS_FILE), metavar="FILE", help="Where to write the errors.")
    parser.add_argument("--markdown", action="store_true", help="Print tables for docs/results.")
    arguments = parser.parse_args()
    if arguments.fit:
        shares = fitted()
        for name in FITTED_SHARES:
            print(f"{name} = {getattr(shares, name):.3g}")
        return
    accuracy = measure()
    write_json(arguments.output, accuracy.as_json())
    print(markdown(accuracy) if arguments.markdown else accuracy.note)


if __name__ == "__main__":
    main()
