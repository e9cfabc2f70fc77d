"""Other schedulers on one loaded model: the same tokens, nothing left over, and refusals of what memory fixes."""

from __future__ import annotations

from typing import Any

import pytest

from headway import SamplingParams
from headway.engine.llm_engine import LLMEngine
from headway.engine.loaded_model import LoadedModel
from headway.errors import ConfigError
from tests.unit.no_model import all_outputs
from tests.unit.runner.tiny_llm import TinyLLM

CHANGES: tuple[dict[str, Any], ...] = (
    {"batching": "static", "kv_allocation": "contiguous-max"},
    {"scheduling_policy": "sjf", "max_num_seqs": 2},
    {"prefill_mode": "prefill-first", "enable_prefix_caching": True, "max_num_batched_tokens": 8},
)


def answers(engine: LLMEngine, name: str) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    for number in range(9):
        engine.add_request(f"{name} {number}", list(range(1 + number, 9 + number)), params, stream=False)
    done = {output.request_id: output.outputs[0].token_ids for output in all_outputs(engine)}
    return [done[f"{name} {number}"] for number in range(9)]


def test_the_same_tokens_with_every_scheduler(tmp_path) -> None:
    model = LoadedModel(TinyLLM(tmp_path).on_cpu(max_num_seqs=4, max_num_batched_tokens=16, num_kv_blocks=48).engine)
    expected = answers(model.engine, "first")
    for change in CHANGES:
        engine = model.reschedule(**change)
        assert answers(engine, "again") == expected, "names come back, too: the runner has forgotten who had them"
        assert {name: getattr(engine.config.scheduler, name, None) for name in change}.items() >= {
            (name, value) for name, value in change.items() if name not in ("kv_allocation", "enable_prefix_caching")
        }
    engine = model.reschedule(num_blocks=12)
    assert engine.config == model.config, "options are over those of the start, not over the last ones"
    assert (engine.core.scheduler.kv_cache.num_blocks, model.plan.num_blocks) == (12, 48)
    assert answers(engine, "again") == expected
    model.shutdown()


def test_limits_do_not_grow_and_memory_stays(tmp_path) -> None:
    model = LoadedModel(TinyLLM(tmp_path).on_cpu(max_num_seqs=4, max_num_batched_tokens=16).engine)
    with pytest.raises(ConfigError, match="max_num_seqs cannot grow from 4 to 5"):
        model.reschedule(max_num_seqs=5)
    with pytest.raises(ConfigError, match="'block_size' cannot be changed"):
        model.reschedule(block_size=4)
    with pytest.raises(ConfigError, match="num_blocks cannot grow"):
        model.reschedule(num_blocks=model.plan.num_blocks + 1)
    model.engine.add_request("one", [1, 2, 3], SamplingParams(max_tokens=2), stream=False)
    with pytest.raises(ConfigError, match="unfinished"):
        model.reschedule(max_num_seqs=2)
    model.engine.abort("one")
    model.shutdown()
