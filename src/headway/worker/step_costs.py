"""What a step costs on a device: the bytes that it must read and its flops, from its size and its model's costs.

    bytes read   W for each forward pass  +  K · cached tokens of its requests, each once
    flops        2·P · tokens  +  4·q·layers · pairs  +  2·V·H · sampled rows

These are the least numbers: a kernel that reads keys and values twice, or computes padding, does more.
"""

from __future__ import annotations

from dataclasses import replace

from headway.core.step_work import StepWork
from headway.models.costs import ModelCosts, model_costs
from headway.models.decoder_config import DecoderConfig
from headway.worker.memory_plan import MemoryPlan


def planned_costs(model: DecoderConfig, plan: MemoryPlan) -> ModelCosts:
    """The costs of a model, or of one rank's part, in the number formats that an engine runs it with."""
    costs = model_costs(model, bytes_per_weight=1.0, kv_bytes_per_token=plan.bytes_per_block / plan.block_size)
    return replace(
        costs,
        weight_bytes=plan.step_weight_bytes,
        linear_flops_per_token=costs.linear_flops_per_token / plan.num_ranks,
        attention_flops_per_pair=costs.attention_flops_per_pair / plan.num_ranks,
        output_flops=costs.output_flops / plan.num_ranks,
        output_bytes=plan.output_weight_bytes,
    )


def step_read_bytes(work: StepWork, costs: ModelCosts) -> float:
    """Bytes that a step must read: the weights once, and the keys and values of its requests."""
    num_bytes = costs.weight_bytes + costs.kv_bytes_per_token * work.num_cached_tokens
    return num_bytes if work.num_sampled else num_bytes - costs.output_bytes


def step_flops(work: StepWork, costs: ModelCosts) -> float:
    """Flops of a step: linear layers per token, attention per pair, and the output projection per sampled row."""
    return (
        costs.linear_flops_per_token * work.num_tokens
        + costs.attention_flops_per_pair * work.num_pairs
        + costs.output_flops * work.num_sampled
    )
