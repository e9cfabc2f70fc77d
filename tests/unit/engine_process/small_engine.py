"""A real `LLMEngine` without a model, for this process or (as a factory) for an engine process.

The n-th token of a sequence is the n-th byte of the alphabet, over and over. What a request is called decides its fate:

    fail-…   every step that it takes part in fails
    slow-…   the step with which it enters takes a second
    stuck-…  the step with which it enters does not end
"""

from __future__ import annotations

import dataclasses
import string
import threading
import time
from typing import TYPE_CHECKING, Any

from headway.config import EngineConfig
from headway.core import SchedulerOutput
from headway.engine.llm_engine import LLMEngine
from headway.errors import ConfigError
from headway.executor.fake import FakeExecutor, FakeStep
from headway.tokenizer import Tokenizer
from headway.tokenizer.from_gguf import tokenizer_from_gguf
from tests.unit.no_model import nominal_config, nominal_plan
from tests.unit.tokenizer.small import byte_level_metadata

if TYPE_CHECKING:
    from headway.transfer.block_format import BlockFormat
    from headway.transfer.block_store import BlockTransfers

SLOW_STEP_S = 1.0
MAX_MODEL_LEN = 4096
NUM_HOST_SLOTS = 512


class Executor(FakeExecutor):
    def __init__(self, token_ids: list[int], step_s: float, transfers: BlockTransfers | None = None) -> None:
        super().__init__(lambda request_id, num_tokens: token_ids[num_tokens % len(token_ids)], transfers=transfers)
        self._step_s = step_s

    def submit(self, output: SchedulerOutput) -> FakeStep:
        time.sleep(self._step_s)
        if any(new.request_id.startswith("slow-") for new in output.new_requests):
            time.sleep(SLOW_STEP_S)
        if any(new.request_id.startswith("stuck-") for new in output.new_requests):
            threading.Event().wait()
        if any(share.request_id.startswith("fail-") for share in output.scheduled):
            raise RuntimeError("secret words")
        return super().submit(output)


def small_tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(pre="gpt-2"))


def create_engine(options: dict[str, Any]) -> LLMEngine:
    """Options of `EngineConfig`; `step_s`; and `refuse`: a text to fail with."""
    if "refuse" in options:
        raise ConfigError(options["refuse"])
    step_s = options.pop("step_s", 0.0)
    config = EngineConfig.from_options(**options).resolve("cpu")
    tokenizer = small_tokenizer()
    token_ids = [tokenizer.encode(letter)[0] for letter in string.ascii_lowercase]
    model = nominal_config(vocab_size=tokenizer.vocab_size, max_model_len=MAX_MODEL_LEN)
    plan = nominal_plan(num_blocks=config.cache.num_kv_blocks or 1024, block_size=4, max_model_len=MAX_MODEL_LEN)
    transfers = None
    if config.cache.host_cache_memory:  # blocks that travel, although nothing is computed with them
        transfers, block_format = _transfers(plan.num_blocks)
        plan = dataclasses.replace(plan, num_host_slots=NUM_HOST_SLOTS, block_format=block_format)
    executor = Executor(token_ids, step_s, transfers)
    return LLMEngine(config, executor=executor, tokenizer=tokenizer, model_config=model, plan=plan)


def _transfers(num_blocks: int) -> tuple[BlockTransfers, BlockFormat]:
    """Only these need torch, which takes long to import."""
    import torch

    from headway.kv.layer_cache import LayerKVCache
    from headway.transfer.block_format import BlockFormat
    from headway.transfer.block_store import BlockTransfers
    from headway.transfer.host_blocks import HostBlocks

    caches = [LayerKVCache.zeros(num_blocks, 1, 8, 4, dtype=torch.float32, device="cpu")]
    slots = HostBlocks(caches, NUM_HOST_SLOTS)
    block_format = BlockFormat(
        weights=(),
        numbers="",
        kernels="",
        attention_backend="",
        device="cpu",
        kv_format="float32",
        block_size=4,
        block_bytes=slots.slot_bytes,
    )
    return BlockTransfers(slots), block_format


def create_slow_engine(options: dict[str, Any]) -> LLMEngine:
    """The same with steps of 2 ms, so that there is a middle to do something in."""
    return create_engine({"step_s": 0.002, "num_kv_blocks": 2048, **options})
