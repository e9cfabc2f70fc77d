"""Timing attention on blocks that lie in order and anywhere: both layouts are the same step, measured in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.triton_device import DEVICE  # isort: split

from headway.attention import AttentionBatch
from headway.errors import ConfigError
from headway_lab.bench.attention_times import AttentionCase, AttentionWork, Effort, HeadShape, measure_layouts

SHAPE = HeadShape(num_heads=4, num_kv_heads=2, head_dim=32, kv_dtype="float32", q_dtype="float32")
DECODE, CHUNK = AttentionWork(num_requests=2, num_new=1, context=40), AttentionWork(1, 9, 33)
QUICK = Effort(past_cache_bytes=0.0, max_rounds=3, min_rounds=1)


def attended(case: AttentionCase, batch: AttentionBatch, keys: Tensor, values: Tensor) -> Tensor:
    """Attention over these tokens [requests, context, heads, dim], wherever the batch has its blocks."""
    cache = case.backend.kv_caches[0]
    places = torch.arange(keys.shape[1])
    for request in range(batch.num_requests):
        blocks = batch.block_table[request].cpu().long()[places // cache.block_size].to(cache.v.device)
        cache.write(blocks, (places % cache.block_size).to(cache.v.device), keys[request], values[request])
    case.backend.plan(batch)
    return case.run(0)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("work", [DECODE, CHUNK], ids=["decode", "chunk"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_both_layouts_are_the_same_step(backend: str, work: AttentionWork, block_size: int) -> None:
    device = DEVICE.type if backend == "triton" else "cpu"
    case = AttentionCase.of(device, SHAPE, work, block_size, backend_name=backend)
    tables = [batch.block_table.cpu() for batch in (case.contiguous, case.scattered)]
    assert not torch.equal(*tables) and torch.equal(tables[0].flatten(), tables[1].flatten().sort().values)
    torch.manual_seed(1)
    keys, values = (torch.randn(work.num_requests, work.context, 2, 32, device=device) for _ in range(2))
    results = [attended(case, batch, keys, values) for batch in (case.contiguous, case.scattered)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert results[0].abs().sum() > 0


def test_both_layouts_are_timed_in_turn() -> None:
    found = measure_layouts("cpu", SHAPE, DECODE, 16, QUICK)
    assert found.contiguous_s > 0 and found.ratio == found.scattered_s / found.contiguous_s


@pytest.mark.parametrize("block_size", [0, 257])
def test_a_block_size_that_no_engine_takes_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match="block_size must be between 1 and 256"):
        measure_layouts("cpu", SHAPE, DECODE, block_size, QUICK)


def test_layers_are_so_many_that_no_cache_holds_them() -> None:
    layer_bytes = SHAPE.bytes_per_token * 2 * 48  # blocks of 16 for 40 tokens
    case = AttentionCase.of("cpu", SHAPE, DECODE, 16, past_cache_bytes=2.5 * layer_bytes)
    assert len(case.backend.kv_caches) == 3
