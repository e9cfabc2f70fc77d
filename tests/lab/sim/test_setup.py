"""Options over a calibration: what they change, and which are refused because nobody knows what they would."""

from __future__ import annotations

import pytest

from headway.core.request_options import RequestOptions
from headway.errors import ConfigError
from headway_lab.sim.cost_model import Link
from headway_lab.sim.setup import check_ranks, check_work, set_up, with_oracle
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.sim.machines import calibration


def test_options_of_scheduler_and_cache() -> None:
    """What is left open is as calibrated."""
    setup = set_up(calibration(), {})
    assert (setup.scheduler.max_num_seqs, setup.scheduler.max_num_batched_tokens) == (8, 64)
    assert (setup.machine.num_blocks, setup.machine.block_size, setup.cache.enable_prefix_caching) == (200, 4, False)
    assert not setup.notes
    setup = set_up(calibration(), {"scheduling_policy": "sjf", "enable_prefix_caching": True, "num_kv_blocks": 50})
    assert (setup.scheduler.scheduling_policy, setup.cache.enable_prefix_caching) == ("sjf", True)
    assert setup.machine.num_blocks == 50
    assert set_up(calibration(), {"kv_cache_memory": 10 * 1024}).machine.num_blocks == 10


def test_a_limit_that_was_given_goes_before_a_calibrated_one() -> None:
    limits = set_up(calibration(), {"max_num_seqs": 100}).scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (100, 100)
    limits = set_up(calibration(), {"max_num_batched_tokens": 4}).scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (4, 4)
    with pytest.raises(ConfigError, match="must be at least max_num_seqs"):
        set_up(calibration(), {"max_num_seqs": 100, "max_num_batched_tokens": 50})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype cannot be simulated"),
        ({"gpu_memory_utilization": 0.5}, "--num-kv-blocks"),
        ({"kv_cache_memory": 10}, "no room"),
        ({"host_cache_memory": 10_000_000, "enable_prefix_caching": True}, "was not measured"),
    ],
)
def test_what_cannot_be_known_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_up(calibration(), options)


def test_work_that_the_engine_would_refuse() -> None:
    machine = calibration().machine()
    check_work([BenchRequest([1] * 200, 56)], machine)
    with pytest.raises(ConfigError, match="257 tokens"):
        check_work([BenchRequest([1] * 200, 57)], machine)


def test_an_oracle_knows_lengths_unless_somebody_has_said_them() -> None:
    work = with_oracle([BenchRequest([1], 7), BenchRequest([1], 7, options=RequestOptions(predicted_tokens=3.0))])
    assert [request.options.predicted_tokens for request in work] == [7.0, 3.0]


def test_a_block_of_another_size_has_other_bytes_and_the_link_is_as_given() -> None:
    setup = set_up(calibration(), {"block_size": 8}, link=Link(25.0))
    assert (setup.machine.num_blocks, setup.machine.block_size) == (100, 8), "the same memory"
    assert (setup.machine.bytes_per_block, setup.machine.link) == (2048, Link(25.0))
    assert "not known" in setup.notes[0]
    assert set_up(calibration(), {}).machine.link == Link(450.0, 8e-6)


def test_ranks_are_not_simulated_with_the_steps_of_another_number() -> None:
    divided = calibration(tensor_parallel_size=2, num_layers=2, hidden_size=64)
    check_ranks(divided, None)
    check_ranks(divided, 2)
    with pytest.raises(
        ConfigError,
        match="one rank of 2.*'headway calibrate --tensor-parallel-size 4 --collectives none --output FILE'",
    ):
        check_ranks(divided, 4)
    with pytest.raises(ConfigError, match="one rank of 1"):
        check_ranks(calibration(), 2)
    assert "2 ranks: steps of one were measured alone" in set_up(divided, {}).notes[0]
