"""A model that is never computed, for engines whose executor makes tokens up."""

from __future__ import annotations

from headway.models.decoder_config import DecoderConfig
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
