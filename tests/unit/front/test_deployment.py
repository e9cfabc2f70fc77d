"""Which engines there are, from what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import ARRIVAL_BYTES, CPU_ARRIVAL_BYTES, PREFILL_STEP_TOKENS, EngineConfig
from headway.errors import ConfigError
from headway.front.deployment import Deployment
from headway.front.roles import Roles
from headway.front.scaling import ScalingRule

APART = Roles(1, 1)


def added(options: dict[str, Any], *, has_gpu: bool = True, crosses_network: bool = False) -> dict[str, Any]:
    config = EngineConfig.from_options(**options)
    return config.options_for_roles(has_gpu=has_gpu, crosses_network=crosses_network)


def test_blocks_that_arrive_have_room_which_depends_on_how_they_come() -> None:
    assert added({}) == {"arrival_memory": ARRIVAL_BYTES}
    assert added({}, crosses_network=True) == {"host_cache_memory": ARRIVAL_BYTES}
    assert added({"disk_cache": "blocks"}) == {"host_cache_memory": ARRIVAL_BYTES}
    assert added({}, has_gpu=False) == {"host_cache_memory": CPU_ARRIVAL_BYTES}
    assert added({}, has_gpu=False, crosses_network=True) == {"host_cache_memory": ARRIVAL_BYTES}
    assert added({"host_cache_memory": 12345}) == added({"arrival_memory": 12345}) == {}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_prefix_caching": False}, "prefix cache"),
        ({"preemption_mode": "recompute"}, "recompute"),
        ({"speculation": "draft", "draft_model": "x"}, "draft model"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
    ids=str,
)
def test_what_does_not_go_with_roles_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"roles .*{why}"):
        Deployment(options, roles=APART)


def test_those_that_answer_come_first_and_prompts_are_computed_in_steps_of_another_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    for given, limit in ({}, PREFILL_STEP_TOKENS), ({"max_num_batched_tokens": 77}, 77):
        *decode, prefill = Deployment(given, roles=Roles(1, 2)).specs
        assert prefill.options["max_num_batched_tokens"] == limit
        assert [spec.options.get("max_num_batched_tokens") for spec in decode] == [
            given.get("max_num_batched_tokens")
        ] * 2
        found = [spec.blocks for spec in (*decode, prefill)]
        assert [each and each.role for each in found] == ["decode", "decode", "prefill"]
        assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in (*decode, prefill)] == ["0", "1", "2"]
    *_, prefill = Deployment({"device": "cpu"}, roles=APART).specs
    assert prefill.options == {"device": "cpu", "host_cache_memory": CPU_ARRIVAL_BYTES}


def test_options_that_only_another_factory_knows_are_left_to_it() -> None:
    first, second = Deployment({"device": "cpu", "step_s": 0.1}, factory="a:b", num_replicas=2).specs
    assert first.options == second.options == {"device": "cpu", "step_s": 0.1}
    assert first.config.device.device == "cpu"


def test_the_folder_of_the_sockets_goes_with_the_deployment() -> None:
    deployment = Deployment({"device": "cpu"}, roles=APART)
    exchange = deployment.specs[0].blocks
    assert exchange is not None and Path(exchange.folder).is_dir()
    deployment.close()
    assert not Path(exchange.folder).exists()
    Deployment().close()


@pytest.mark.parametrize(
    ("options", "is_reported"),
    [
        ({}, False),
        ({"reports_caches": True}, True),
        ({"num_replicas": 2}, True),
        ({"num_replicas": 2, "router": "round-robin"}, False),
        ({"scaling": ScalingRule(1, 3)}, True),
        ({"roles": APART, "router": "round-robin"}, True),
    ],
    ids=str,
)
def test_caches_are_reported_where_that_is_of_use(options: dict[str, Any], is_reported: bool) -> None:
    assert {spec.reports_cache for spec in Deployment({"device": "cpu"}, **options).specs} == {is_reported}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_replicas": 0}, "at least one replica"),
        ({"num_replicas": 4, "scaling": ScalingRule(1, 3)}, "limits of scaling, not 4"),
        ({"roles": APART, "scaling": ScalingRule(1, 2)}, "without scaling"),
        ({"router": "by hand"}, "router must be one of"),
    ],
    ids=str,
)
def test_what_cannot_be(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Deployment(**options)
