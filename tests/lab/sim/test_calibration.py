"""A calibration survives being saved, and anything else is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.models.costs import ModelCosts
from headway.worker.ceilings import Ceilings
from headway_lab.sim import Calibration
from headway_lab.sim.cost_model import Ranks
from tests.lab.sim.machines import calibration

COSTS = ModelCosts(1e9, 1e3, 2e9, 1e3, 1e6, 1e8)


def test_a_saved_one_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for one in (
        calibration(),
        calibration(overlap=True, num_host_slots=7, verified={"a": {"mean_ttft_ms": 0.1}}),
        calibration(tensor_parallel_size=4, num_layers=2, hidden_size=64),
        calibration(costs=COSTS, ceilings=Ceilings(1e12, 1e14)),
    ):
        one.save(path)
        assert Calibration.load(path) == one
    with pytest.raises(ConfigError, match="Cannot write"):
        calibration().save(tmp_path / "none" / "machine.json")


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(json.dumps(calibration().as_json()))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "not JSON"),
        ("[]", "no calibration"),
        ("{}", "no calibration"),
        (changed(lambda d: d.update(format=1)), "format 1, not 2: calibrate again"),
        (changed(lambda d: d.pop("num_blocks")), "'num_blocks' is missing"),
        (changed(lambda d: d.update(num_blocks=0)), "num_blocks is 0"),
        (changed(lambda d: d.update(num_blocks="many")), "num_blocks is 'many'"),
        (changed(lambda d: d.update(overlap="yes")), "overlap"),
        (changed(lambda d: d.update(restore_block_s=-1.0)), "restore_block_s"),
        (changed(lambda d: d.update(tensor_parallel_size=0)), "tensor_parallel_size is 0"),
        (changed(lambda d: d.update(tensor_parallel_size=2)), "num_layers is 0"),
        (changed(lambda d: d.update(tensor_parallel_size=2, num_layers=2)), "hidden_size is 0"),
        (changed(lambda d: d.update(colour="red")), "'colour' is not known"),
        (changed(lambda d: d["cost"]["terms"].pop("context")), "other terms"),
        (changed(lambda d: d["cost"]["terms"].update(context=-1.0)), "context is -1.0"),
        (changed(lambda d: d["cost"].pop("errors")), "'errors' is missing"),
        (changed(lambda d: d["cost"]["errors"][0].update(kind="other")), "no kind of step"),
        (changed(lambda d: d["host"].update(before_s=-1.0)), "negative"),
        (changed(lambda d: d["host"].update(colour=1.0)), "cannot be used"),
        (changed(lambda d: d.update(ceilings={"bandwidth_bytes_s": 0.0, "flops_s": 1.0})), "bandwidth_bytes_s of ceil"),
        (changed(lambda d: d.update(ceilings={"flops_s": 1.0})), "bandwidth_bytes_s"),
        (
            changed(lambda d: d.update(costs=dataclasses.asdict(COSTS) | {"output_flops": "many"})),
            "output_flops of costs",
        ),
        (changed(lambda d: d["scheduler"].update(colour=1.0)), "cannot be used"),
        (changed(lambda d: d["scheduler"].update(scheduling_policy="none")), "scheduling_policy"),
        (changed(lambda d: d["cache"].update(prefix_caching="on")), "prefix_caching is now enable_prefix_caching"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Calibration.load(path)


def test_a_slower_machine() -> None:
    slow = calibration().scaled(2.0)
    assert slow.cost.coefficients == tuple(2 * c for c in calibration().cost.coefficients)
    assert slow.host.after_s == 2 * calibration().host.after_s


def test_one_from_before_ranks_is_that_of_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(changed(lambda d: [d.pop(name) for name in ("tensor_parallel_size", "num_layers", "hidden_size")]))
    assert Calibration.load(path).machine().ranks.number == 1
    divided = calibration(tensor_parallel_size=4, num_layers=2, hidden_size=64, dtype="bfloat16")
    assert divided.machine().ranks == Ranks(4, 2, 64, 1000, 2)
    assert calibration(dtype="float32").ranks.value_bytes == 4
