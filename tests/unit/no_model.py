"""A model that is never computed, for engines whose executor makes tokens up."""

from __future__ import annotations

import dataclasses
from typing import Any

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.executor import Executor
from headway.models.decoder_config import DecoderConfig
from headway.outputs import RequestOutput
from headway.tokenizer import Tokenizer
from headway.worker.memory_plan import MemoryPlan


def nominal_config(*, vocab_size: int, max_model_len: int) -> DecoderConfig:
    """As small as a configuration can be."""
    return DecoderConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_model_len,
    )


def nominal_plan(*, num_blocks: int, block_size: int, max_model_len: int) -> MemoryPlan:
    """So many blocks of nothing."""
    return MemoryPlan(
        device="none",
        dtype="none",
        weight_bytes=0,
        kv_dtype="none",
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=1,
        max_model_len=max_model_len,
    )


ENGINE_PARTS = ("now", "lengths")


def engine_on(
    executor: Executor,
    *,
    num_blocks: int = 64,
    num_host_slots: int = 0,
    max_model_len: int = 64,
    vocab_size: int = 100,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> LLMEngine:
    """An engine on this executor: options are those of `EngineConfig`, and `now` and `lengths` of the engine."""
    parts = {name: options.pop(name) for name in ENGINE_PARTS if name in options}
    plan = nominal_plan(num_blocks=num_blocks, block_size=4, max_model_len=max_model_len)
    return LLMEngine(
        EngineConfig.from_options(**options).resolve("cpu"),
        executor=executor,
        tokenizer=tokenizer,
        model_config=nominal_config(vocab_size=vocab_size, max_model_len=max_model_len),
        plan=dataclasses.replace(plan, num_host_slots=num_host_slots),
        **parts,
    )


def all_outputs(engine: LLMEngine, errors: dict[str, str] | None = None) -> list[RequestOutput]:
    """What comes out until nothing is left to do; invariants are checked after every step. Failures go to `errors`."""
    outputs = []
    while engine.has_unfinished_requests():
        step = engine.step()
        outputs += step.outputs
        if errors is not None:
            errors |= step.errors
        engine.check_invariants()
    assert engine.core.scheduler.kv_cache.num_used_blocks == 0
    return outputs
