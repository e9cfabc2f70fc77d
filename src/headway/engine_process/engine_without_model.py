"""An engine with everything but a model, as a factory for `engine_process`: for tests, and to measure the server alone.

Scheduler, blocks, stop rules, tokenizer and detokenizer are real. The n-th token of every sequence, after the prompt,
is the n-th token of one fixed text that repeats for ever. It never contains end-of-sequence. Log-probabilities, which
only a model has, are refused, and so are parameters that compare sequences by them.
"""

from __future__ import annotations

import time
from typing import Any

from headway.config import EngineConfig
from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.core.scheduler_output import SchedulerOutput
from headway.engine.llm_engine import LLMEngine
from headway.engine.prompt_forms import Prompt
from headway.engine.request_preparer import PreparedRequest
from headway.errors import ConfigError, InvalidRequestError
from headway.executor.fake import FakeExecutor, FakeStep
from headway.loader.chosen_model import open_model
from headway.sampling_params import SamplingParams
from headway.worker.memory_plan import MemoryPlan

TEXT = "The line never stops, and so nobody waits: a seat that gets free is taken at the very next stop. "
DEFAULT_NUM_BLOCKS = 4096


def create_engine(options: dict[str, Any]) -> LLMEngine:
    """Build the engine. The options are those of `EngineConfig` and `step_s`, the duration of a step, 0 by default."""
    step_s = float(options.pop("step_s", 0.0))
    config = EngineConfig.from_options(**options).resolve("cpu")
    if config.cache.disk_cache:
        raise ConfigError("disk_cache keeps KV blocks, and this engine has none.")
    checkpoint = open_model(config.model)
    tokenizer = checkpoint.tokenizer()
    token_ids = [1] if tokenizer is None else tokenizer.encode(TEXT, add_special_tokens=False)
    plan = MemoryPlan(
        device="none",
        dtype="none",
        weight_bytes=0,
        kv_dtype="none",
        num_blocks=config.cache.num_kv_blocks or DEFAULT_NUM_BLOCKS,
        block_size=config.cache.block_size,
        bytes_per_block=0,
        max_model_len=config.model.max_model_len or checkpoint.config.max_position,
    )
    return _ModellessEngine(
        config,
        executor=_SlowExecutor(token_ids, step_s),
        tokenizer=tokenizer,
        model_config=checkpoint.config,
        plan=plan,
    )


class _ModellessEngine(LLMEngine):
    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> PreparedRequest:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                raise InvalidRequestError("This engine has no model, and so no log-probabilities.", param=name)
        if params.pooling is not None:
            raise InvalidRequestError("This engine has no model, and so no vectors.", param="pooling")
        if not params.can_stream:
            name = "use_beam_search" if params.use_beam_search else "best_of"
            raise InvalidRequestError("This engine has no model, and so nothing to compare sequences by.", param=name)
        return super().prepare(request_id, prompt, params, options)


class _SlowExecutor(FakeExecutor):
    def __init__(self, token_ids: list[int], step_s: float) -> None:
        super().__init__(lambda request_id, num_tokens: token_ids[num_tokens % len(token_ids)])
        self._step_s = step_s

    def submit(self, output: SchedulerOutput) -> FakeStep:
        if self._step_s:
            time.sleep(self._step_s)
        return super().submit(output)
