"""The cost model from a data sheet: it meets its formula, follows the device and the formats, and its published error
is that of the code."""

from __future__ import annotations

import pytest

from headway.core.step_work import StepWork
from headway.errors import ConfigError
from headway.worker.memory_needs import planned_model
from headway_lab.sim.calibration import Calibration
from headway_lab.size.accuracy import (
    MeasuredRow,
    measured_accuracy,
    row_error,
    shape_config,
    step_errors,
)
from headway_lab.size.data_sheet_model import (
    RankCosts,
    data_sheet_calibration,
    data_sheet_cost,
    data_sheet_seconds,
    moved,
    rank_costs,
)
from headway_lab.size.data_sheets import DEVICES, DataSheet, find_device, known_device

H200 = find_device("h200")


def rank(model: str = "llama31-8b", **options: object) -> RankCosts:
    config = shape_config(model, max_model_len=4096, **options)
    return rank_costs(planned_model(config), str(options.get("quantization", "none")))


@pytest.mark.parametrize(
    "work",
    [
        StepWork(1, 1, 1, 0),
        StepWork(8, 8, 8, 4000),
        StepWork(128, 128, 128, 30_000),
        StepWork(64, 1, 1, 0, 1, 2048.0),
        StepWork(2048, 1, 0, 0, 1, 2048 * 1024.0),
        StepWork(256, 2, 2, 500, 1, 255 * 127.5),
    ],
)
def test_the_cost_model_meets_its_formula_at_the_knees(work: StepWork) -> None:
    own = rank()
    assert data_sheet_cost(own, H200).seconds(work) == pytest.approx(data_sheet_seconds(work, own, H200), rel=1e-9)


@pytest.mark.parametrize("number", [20, 50, 100, 200])
def test_between_the_knees_it_is_close(number: int) -> None:
    own = rank()
    work = StepWork(number, number, number, 0)
    assert data_sheet_cost(own, H200).seconds(work) == pytest.approx(data_sheet_seconds(work, own, H200), rel=0.02)


def test_a_step_takes_no_less_than_its_bytes_and_flops() -> None:
    own, sheet = rank(), H200
    one = data_sheet_seconds(StepWork(1, 1, 1, 0), own, sheet)
    assert one > own.costs.weight_bytes / (1e9 * sheet.bandwidth_gb_s)
    many = data_sheet_seconds(StepWork(4096, 1, 1, 0, 1), own, sheet)
    assert many > 4096 * own.costs.linear_flops_per_token / (1e12 * sheet.tflops)


@pytest.mark.parametrize(
    ("options", "work", "least", "most"),
    [
        ({"quantization": "fp8"}, StepWork(1, 1, 1, 0), 1.4, 2.0),  # the output projection stays in two bytes
        ({"quantization": "fp8"}, StepWork(4096, 1, 0, 0, 1), 1.8, 2.0),
        ({"quantization": "int4"}, StepWork(1, 1, 1, 0), 1.4, 2.0),
        ({"quantization": "int4"}, StepWork(4096, 1, 0, 0, 1), 0.99, 1.01),  # multiplied as floats
        ({"tensor_parallel_size": 2}, StepWork(4096, 1, 0, 0, 1), 1.7, 2.0),
    ],
)
def test_formats_and_ranks_are_faster_where_they_should_be(
    options: dict[str, object], work: StepWork, least: float, most: float
) -> None:
    whole = data_sheet_seconds(work, rank(), H200)
    assert least < whole / data_sheet_seconds(work, rank(**options), H200) < most


def test_a_calibration_moves_by_the_ratio_of_the_data_sheets() -> None:
    measured = Calibration.find("h200-llama31-8b").cost
    floats, codes = data_sheet_cost(rank(), H200), data_sheet_cost(rank(quantization="fp8"), H200)
    works = [StepWork(32, 32, 32, 9000), StepWork(1, 1, 1, 100), StepWork(512, 1, 1, 0, 1, 5e4)]
    for work in works:
        assert moved(measured, floats, floats).seconds(work) == pytest.approx(measured.seconds(work), rel=1e-9)
        ratio = moved(measured, floats, codes).seconds(work) / measured.seconds(work)
        assert ratio == pytest.approx(codes.seconds(work) / floats.seconds(work), rel=0.1)


def test_an_engine_from_a_data_sheet() -> None:
    """As many blocks as fit, and the engine's own defaults."""
    config = shape_config("llama31-8b", max_model_len=8192)
    found, planned = data_sheet_calibration(config, H200)
    calibrated = Calibration.find("h200-llama31-8b")
    assert found.num_blocks == pytest.approx(calibrated.num_blocks, rel=0.02)
    assert (found.block_size, found.bytes_per_block) == (calibrated.block_size, calibrated.bytes_per_block)
    assert found.scheduler["max_num_seqs"] == 256 and found.overlap
    assert planned.step_weight_bytes == pytest.approx(15.0e9, rel=0.01)  # all but the table of embeddings
    with pytest.raises(ConfigError, match="takes 15.0 GiB of weights"):
        data_sheet_calibration(config, DataSheet("small", 1000.0, 100.0, 16.0))


def test_the_published_error_is_that_of_the_code() -> None:
    """`python benchmarks/data_sheet_shares.py` writes it anew after a change of the model or of a calibration."""
    accuracy = measured_accuracy()
    for name in dict.fromkeys(one.machine for one in accuracy.steps):
        told = [one for one in accuracy.steps if one.machine == name]
        found = step_errors(name, Calibration.find(name), was_fitted=told[0].was_fitted)
        assert [(one.kind, one.num_steps) for one in found] == [(one.kind, one.num_steps) for one in told]
        for now, then in zip(found, told, strict=True):
            assert (now.mean, now.p95, now.bias) == pytest.approx((then.mean, then.p95, then.bias), rel=1e-6)
    quick = [row for row in accuracy.rows if row.scenario == "b1"]
    assert len(quick) == 4
    for row in quick:
        again = row_error(MeasuredRow(row.model, row.quantization, row.scenario, row.key, row.measured), H200)
        assert again.predicted == pytest.approx(row.predicted, rel=1e-6)


def test_the_error_is_within_what_is_wanted() -> None:
    accuracy = measured_accuracy()
    held_out = accuracy.held_out_rows
    assert {("qwen3-0.6b", "auto"), ("llama31-8b", "fp8")} <= {(row.model, row.quantization) for row in held_out}
    assert accuracy.largest_row_error < 0.25
    assert all(one.mean < 0.25 for one in accuracy.steps)
    assert f"{accuracy.largest_row_error:.0%} at most" in accuracy.note


def test_known_devices() -> None:
    names = [sheet.name for sheet in DEVICES]
    assert len(set(names)) == len(names) and {"h200", "h100", "a100-80", "l40s", "l4", "rtx4090", "mi300x"} <= set(
        names
    )
    for text in ("H200", "RTX 4090", "A100-80", "nvidia l4"):
        assert known_device(text) is not None
    with pytest.raises(ConfigError, match="no device 'h20'.*Known are b200, h200"):
        find_device("h20")
    with pytest.raises(ConfigError, match="above 0"):
        DataSheet("none", 0.0, 1.0, 1.0)
