from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from headway.config import EngineConfig
from headway.errors import ConfigError, OutOfMemoryError
from headway.kv.layer_cache import LayerKVCache
from headway.kv_formats import FORMATS
from headway.models.decoder_config import DecoderConfig
from headway.worker.formats import Formats
from headway.worker.memory_plan import DEFAULT_CPU_KV_BYTES, MemoryPlan, plan_memory

# 2 (k and v) x 2 layers x 2 heads x 32 numbers x 2 bytes = 512 bytes a token, 8 KiB a block of 16
MODEL = DecoderConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=8192,
)


def plan(
    *, free_bytes: int | None = None, max_position: int = 8192, kv_format: str = "float16", **options: Any
) -> MemoryPlan:
    """For a model with that context."""
    config = EngineConfig.from_options(**options).resolve("cpu")
    return plan_memory(
        config.cache,
        dataclasses.replace(MODEL, max_position=max_position),
        Formats(
            device=torch.device("cpu"),
            dtype=torch.float32,
            quantization="none",
            keeps_stored=False,
            stored="",
            kernels="torch",
            attention_backend="torch_padded",
            kv_format=FORMATS[kv_format],
            torch_threads=None,
            native_threads=None,
        ),
        weight_bytes=1000,
        step_weight_bytes=900,
        output_weight_bytes=100,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
        free_bytes=free_bytes,
    )


def test_a_byte_budget_becomes_blocks_by_a_formula_one_can_check_by_hand() -> None:
    result = plan(kv_cache_memory=1_000_000, max_position=1024)
    assert result.bytes_per_block == 8192
    assert result.num_blocks == 1_000_000 // 8192
    assert result.num_tokens == result.num_blocks * 16
    assert result.kv_bytes <= 1_000_000


@pytest.mark.parametrize(
    ("kv_format", "bytes_per_head"),
    [("float32", 256), ("bfloat16", 128), ("fp8", 2 * (32 + 2)), ("int8", 2 * (32 + 2)), ("int4", 32 + 2 + 16 + 2)],
)
def test_fewer_bits_make_for_more_blocks(kv_format: str, bytes_per_head: int) -> None:
    """Scales count: 2 bytes for a key and 2 for a value."""
    result = plan(kv_cache_memory=1_000_000, max_position=1024, kv_format=kv_format)
    assert result.bytes_per_block == 16 * 2 * 2 * bytes_per_head
    assert result.num_blocks == 1_000_000 // result.bytes_per_block
    assert f"({kv_format})" in str(result)


def test_the_plan_counts_what_a_cache_takes() -> None:
    for name, kv_format in FORMATS.items():
        result = plan(num_kv_blocks=3, max_position=16, kv_format=name)
        layer = LayerKVCache.zeros(3, MODEL.num_kv_heads, MODEL.head_dim, 16, dtype=kv_format)
        assert result.kv_bytes == MODEL.num_layers * sum(tensor.nbytes for tensor in layer.tensors)


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({"max_num_seqs": 2, "max_position": 100}, 2 * 7),  # as many as could ever be in use
        ({"free_bytes": 10**8, "max_num_seqs": 2, "max_position": 100}, 2 * 7),
        ({"max_num_seqs": 512}, DEFAULT_CPU_KV_BYTES // 8192),
        ({"num_kv_blocks": 7, "max_position": 50}, 7),
    ],
)
def test_numbers_of_blocks(options: dict[str, Any], num_blocks: int) -> None:
    assert plan(**options).num_blocks == num_blocks


def test_the_context_shrinks_to_the_cache_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert plan(num_kv_blocks=10).max_model_len == 160
    assert "max_model_len" in caplog.text


def test_a_context_that_the_user_has_fixed_does_not_shrink() -> None:
    assert plan(num_kv_blocks=10, max_model_len=1024).max_model_len == 1024


def test_as_many_host_slots_as_fit() -> None:
    assert plan(num_kv_blocks=4, max_position=64, host_cache_memory=3 * 8192 + 1).num_host_slots == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 8193}, ConfigError, "max_model_len 8193 exceeds the 8192 positions"),
        (
            {"num_kv_blocks": 4, "host_cache_memory": 8191},
            ConfigError,
            "host_cache_memory of 8,191 bytes has no room for a single KV block",
        ),
        ({"kv_cache_memory": 100}, OutOfMemoryError, "No KV block fits"),
        ({"free_bytes": -5}, OutOfMemoryError, "No KV block fits"),
        ({"num_kv_blocks": 2**40}, OutOfMemoryError, "are free"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(**options)


def test_a_system_that_does_not_count_free_pages_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_name(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", no_such_name)
    assert plan(num_kv_blocks=10).num_blocks == 10


def test_the_plan_can_be_read_by_people() -> None:
    text = str(plan(num_kv_blocks=64, max_position=512))
    assert "64 blocks of 16 tokens" in text
    assert "1,024 tokens = 2.0 requests of full length (512 tokens)" in text
