"""Bytes and flops of models and steps, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from headway.core import ScheduledRequest, SchedulerOutput
from headway.core.step_work import StepWork
from headway.loader.builtin_shapes import BUILTIN_SHAPES
from headway.models.costs import ModelCosts, model_costs
from headway.models.hf_config import config_from_hf
from headway.worker.memory_plan import MemoryPlan
from headway.worker.step_costs import planned_costs, step_flops, step_read_bytes

MODEL = config_from_hf(BUILTIN_SHAPES["llama31-8b"], "llama31-8b")
LAYERS = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
OUTPUT = 4096 * 128_256
ROUND = ModelCosts(
    weight_bytes=1e9,
    kv_bytes_per_token=1.0,
    linear_flops_per_token=1e6,
    attention_flops_per_pair=1.0,
    output_flops=1e12,
    output_bytes=1e8,
)
"""The digits of a result say how often each of them counts."""


def test_costs_of_a_shape() -> None:
    costs = model_costs(MODEL, bytes_per_weight=2, kv_bytes_per_token=MODEL.kv_bytes_per_token(2))
    assert costs.weight_bytes == 2 * (LAYERS + OUTPUT)
    assert costs.output_bytes == 2 * OUTPUT
    assert costs.kv_bytes_per_token == 2 * 32 * 1024 * 2
    assert costs.prompt_flops(3) == 2 * LAYERS * 3 + 4 * 4096 * 32 * 6 + 2 * OUTPUT


def test_planned_costs_are_those_of_one_rank() -> None:
    plan = MemoryPlan(
        device="cuda",
        dtype="int4 weights, bfloat16 activations",
        weight_bytes=10**10,
        step_weight_bytes=10**9,
        output_weight_bytes=10**8,
        kv_dtype="bfloat16",
        num_blocks=10,
        block_size=16,
        bytes_per_block=16 * 777,
        max_model_len=160,
    )
    alone, costs = planned_costs(MODEL, plan), planned_costs(MODEL, dataclasses.replace(plan, num_ranks=2))
    assert (costs.weight_bytes, costs.output_bytes, costs.kv_bytes_per_token) == (10**9, 10**8, 777)
    assert (costs.linear_flops_per_token, costs.output_flops) == (LAYERS, OUTPUT)
    assert costs.prompt_flops(100) == alone.prompt_flops(100) / 2


DECODES = (ScheduledRequest("a", 1, 99, (), True), ScheduledRequest("b", 1, 9, (), True))
WHOLE_PROMPT = (ScheduledRequest("c", 4, 0, (), True),)
CHUNK = (ScheduledRequest("d", 10, 20, (), False),)
DRAFTS = (ScheduledRequest("e", 3, 50, (), True, (7, 8)),)


@pytest.mark.parametrize(
    ("shares", "read_bytes", "flops"),
    [
        (DECODES, 1e9 + 100 + 10, 2e12 + 2e6 + 110),
        (WHOLE_PROMPT, 1e9 + 4, 1e12 + 4e6 + (1 + 2 + 3 + 4)),
        (CHUNK, 9e8 + 30, 10e6 + sum(range(21, 31))),
        (DRAFTS, 1e9 + 53, 3e12 + 3e6 + (51 + 52 + 53)),
        (DECODES + CHUNK + DRAFTS, 1e9 + 110 + 30 + 53, 5e12 + 15e6 + 110 + sum(range(21, 31)) + 156),
    ],
    ids=["decodes", "a whole prompt", "a chunk samples nothing", "drafts share their context", "all in one step"],
)
def test_costs_of_a_step(shares: tuple[ScheduledRequest, ...], read_bytes: float, flops: float) -> None:
    num_tokens = sum(share.num_tokens for share in shares)
    work = StepWork.of(SchedulerOutput(0, (), shares, (), (), num_scheduled_tokens=num_tokens))
    assert step_read_bytes(work, ROUND) == read_bytes
    assert step_flops(work, ROUND) == flops
