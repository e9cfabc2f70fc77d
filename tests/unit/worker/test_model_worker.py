"""The worker from load to its last step, and the executor that drives it."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import EngineConfig
from headway.core.create import create_scheduler
from headway.core.request import Request
from headway.core.scheduler_output import SchedulerOutput
from headway.executor.local import LocalExecutor
from headway.loader import open_checkpoint
from headway.models.checkpoint import Checkpoint
from headway.sampling_params import SamplingParams
from headway.worker.model_worker import ModelWorker

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
SMALL: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch_padded", "max_num_seqs": 2, "num_kv_blocks": 8}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return open_checkpoint(str(path), "dummy")


def first_step(config: Any, size: Any) -> SchedulerOutput:
    scheduler = create_scheduler(config.scheduler, config.cache, size)
    scheduler.add_request(Request("a", (1, 2, 3), max_tokens=4, sampling_params=SamplingParams(temperature=0.0)))
    return scheduler.schedule(now_s=0.0)


def test_load_profile_allocate_submit(checkpoint: Checkpoint) -> None:
    config = EngineConfig.from_options(**SMALL, host_cache_memory=2**16).resolve("cpu")
    worker = ModelWorker(config, checkpoint.config, eos_token_ids=())
    seen: list[tuple[int, int]] = []
    worker.load(checkpoint, lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1]
    assert worker.profile() is None, "on a CPU only the options limit the KV cache"
    plan, runner, transfers = worker.allocate(worker.plan(None))
    assert transfers is not None and transfers.disk is None
    assert (plan.num_blocks, plan.block_size, plan.max_model_len) == (8, 16, 64)
    assert (plan.device, plan.dtype, plan.kv_dtype) == ("cpu", "float32", "float32")
    assert plan.num_host_slots == 2**16 // plan.bytes_per_block and plan.restore_block_s > 0
    output = runner.submit(first_step(config, plan)).result()
    assert len(output.sampled["a"].token_ids) == 1
    assert runner.warm_up() == 0


def test_torchs_threads_are_only_borrowed(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_options(**{**SMALL, "dtype": "bfloat16"}, num_threads=1).resolve("cpu")
    executor = LocalExecutor.from_config(config, checkpoint, eos_token_ids=())
    counts: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    executor.submit(first_step(config, executor.plan)).result()
    assert counts == [1, 7]


@pytest.mark.parametrize(("is_async", "in_flight"), [(None, 1), (False, 1), (True, 2)])
def test_steps_in_flight(checkpoint: Checkpoint, is_async: bool | None, in_flight: int) -> None:
    config = EngineConfig.from_options(**SMALL, async_scheduling=is_async).resolve("cpu")
    assert LocalExecutor.from_config(config, checkpoint, eos_token_ids=()).max_in_flight == in_flight


def test_an_executor_that_is_shut_down_holds_no_model(checkpoint: Checkpoint) -> None:
    config = EngineConfig.from_options(**SMALL).resolve("cpu")
    executor = LocalExecutor.from_config(config, checkpoint, eos_token_ids=())
    decoder = weakref.ref(executor._runner.decoder)  # type: ignore[union-attr]
    output = first_step(config, executor.plan)
    gc.collect()
    gc.disable()  # memory is free at once, not when the collector comes
    try:
        executor.shutdown()
        assert decoder() is None
    finally:
        gc.enable()
    assert executor.warm_up() == 0
    with pytest.raises(RuntimeError, match="the executor is shut down"):
        executor.submit(output)
