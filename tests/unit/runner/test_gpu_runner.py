"""The GPU runner in a whole engine: the plain CPU engine's tokens, whatever only changes speed.

Without a GPU its kernels run in Triton's interpreter, one program at a time: prompts are short and requests few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.triton_device import ON_GPU

# isort: split
from headway import LLM, RequestOutput, SamplingParams
from headway.errors import EngineDeadError
from headway.loader.dummy import DummyCheckpoint
from headway.runner.cuda_graphs import StepGraphs, StepShape
from tests.integration.greedy import Run, run
from tests.unit.runner.quick_interpreter import quick_interpreter
from tests.unit.runner.tiny_llm import TinyLLM, random_prompts

PROMPTS = random_prompts(3, 1, 9, 2)
NUM_TOKENS = 5

# Everything here changes speed only; the tokens must stay the same.
VARIANTS: dict[str, dict[str, Any]] = {
    "one step after the other": {},
    "overlapping steps": {"overlap": "on"},
    "no graphs": {"cuda_graphs": "off"},
    "no graphs, overlapping steps": {"cuda_graphs": "off", "overlap": "on"},
    "chunks of 5": {"max_chunk_tokens": 5, "overlap": "on"},
    "chunks of 1": {"max_chunk_tokens": 1},
    "blocks of 1": {"block_size": 1},
    "blocks of 4": {"block_size": 4, "overlap": "on"},
    "blocks of 64": {"block_size": 64},
    "two at a time": {"max_num_seqs": 2, "overlap": "on"},
}


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLLM:
    return TinyLLM(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cpu(tiny: TinyLLM) -> LLM:
    return tiny.on_cpu()


@pytest.fixture(scope="module")
def cpu_tokens(cpu: LLM) -> list[list[int]]:
    tokens = run(cpu, PROMPTS, NUM_TOKENS).tokens
    assert len({tuple(line) for line in tokens}) == len(tokens), "a model that says the same to all tests little"
    return tokens


@pytest.fixture(scope="module")
def overlapped(tiny: TinyLLM) -> LLM:
    return tiny.on_gpu(overlap="on")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """The shapes of the steps that run padded, as graphs do."""
    seen: list[StepShape] = []
    run_shape = StepGraphs.run

    def spy(self: StepGraphs, shape: StepShape) -> None:
        seen.append(shape)
        run_shape(self, shape)

    monkeypatch.setattr(StepGraphs, "run", spy)
    return seen


def run_often(llm: LLM) -> list[Run]:
    """On a GPU three times: shapes that come up again are captured, then replayed."""
    return [run(llm, PROMPTS, NUM_TOKENS) for _ in range(3 if ON_GPU else 1)]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_invariants()
    assert llm.engine.core.scheduler.kv_cache.pool.num_used_blocks == 0
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ------------------------------------------------------------------------------------------------------ greedy tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_the_cpu_engines(tiny: TinyLLM, cpu_tokens: list[list[int]], variant: str) -> None:
    llm = tiny.on_gpu(**VARIANTS[variant])
    assert all(result.tokens == cpu_tokens for result in run_often(llm))


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_greedy_tokens_equal_the_cpu_engines_when_requests_have_to_give_way(
    tiny: TinyLLM, cpu_tokens: list[list[int]], overlap: str
) -> None:
    llm = tiny.on_gpu(overlap=overlap, block_size=2, num_kv_blocks=8)
    for result in run_often(llm):
        assert result.tokens == cpu_tokens
        assert result.num_preemptions >= 1


def test_with_the_options_of_a_real_device(tiny: TinyLLM, cpu_tokens: list[list[int]]) -> None:
    llm = tiny.on_gpu(max_num_seqs=None, max_num_batched_tokens=None, block_size=None, overlap="auto")
    assert all(result.tokens == cpu_tokens for result in run_often(llm))


def test_steps_are_padded_to_rungs_and_without_graphs_they_are_not(
    tiny: TinyLLM, cpu_tokens: list[list[int]], shapes: list[StepShape]
) -> None:
    run(tiny.on_gpu(), PROMPTS[:3], 2)
    assert shapes == [
        StepShape(16, 6, has_singles=True, has_chunks=True),  # 3 + 1 + 9 tokens
        StepShape(4, 4, has_singles=True, has_chunks=False),  # of 3 requests
    ]
    shapes.clear()
    run(tiny.on_gpu(cuda_graphs="off"), PROMPTS[:3], 2)
    assert shapes == []


def test_a_step_without_single_tokens_has_a_shape_of_its_own(
    tiny: TinyLLM, cpu_tokens: list[list[int]], shapes: list[StepShape]
) -> None:
    llm = tiny.on_gpu()
    assert run(llm, PROMPTS[:1], 2).tokens == [cpu_tokens[0][:2]]
    assert shapes == [
        StepShape(16, 6, has_singles=False, has_chunks=True),
        StepShape(1, 1, has_singles=True, has_chunks=False),
    ]
