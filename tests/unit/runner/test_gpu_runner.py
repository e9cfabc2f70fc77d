"""The GPU runner in a whole engine: the plain CPU engine's tokens, whatever only changes speed.

Without a GPU its kernels run in Triton's interpreter, one program at a time: prompts are short and requests few.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.triton_device import ON_GPU, choose  # isort: split

from headway import LLM, RequestOutput, SamplingParams
from headway.attention.triton_paged import TritonPagedAttention
from headway.core.scheduler_output import SchedulerOutput
from headway.errors import ConfigError, RequestFailedError
from headway.runner import PendingStep
from headway.runner.graphed_runner import GraphedStage, StepGraphs, StepShape
from headway.runner.step_runner import StepRunner
from tests.integration.greedy import Run, run
from tests.unit.runner.tiny_llm import VOCAB_SIZE, TinyLLM, finish_all, random_prompts

PROMPTS = random_prompts(3, 1, 9, 2)
NUM_TOKENS = 5

# Everything here changes speed only; the tokens must stay the same.
VARIANTS: dict[str, dict[str, Any]] = {
    "one step after the other": {},
    "overlapping steps": {"async_scheduling": True},
    "no graphs": {"enforce_eager": True},
    "no graphs, overlapping steps": {"enforce_eager": True, "async_scheduling": True},
    "chunks of 5": {"max_chunk_tokens": 5, "async_scheduling": True},
    "chunks of 1": {"max_chunk_tokens": 1},
    "blocks of 1": {"block_size": 1},
    "blocks of 4": {"block_size": 4, "async_scheduling": True},
    "blocks of 64": {"block_size": 64},
    "two at a time": {"max_num_seqs": 2, "async_scheduling": True},
    "those of a real device": dict.fromkeys(
        ("max_num_seqs", "max_num_batched_tokens", "block_size", "async_scheduling")
    ),
}


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
    return tiny.on_gpu(async_scheduling=True)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """The shapes of the steps that run padded, as graphs do."""
    seen: list[StepShape] = []
    run_shape = StepGraphs.run

    def spy(self: StepGraphs, shape: StepShape, step: Callable[[StepShape], None]) -> None:
        seen.append(shape)
        run_shape(self, shape, step)

    monkeypatch.setattr(StepGraphs, "run", spy)
    return seen


def run_often(llm: LLM) -> list[Run]:
    """On a GPU three times: shapes that come up again are captured, then replayed."""
    return [run(llm, PROMPTS, NUM_TOKENS) for _ in range(3 if ON_GPU else 1)]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_invariants()
    assert llm.engine.core.scheduler.kv_cache.num_used_blocks == 0
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ------------------------------------------------------------------------------------------------------ greedy tokens


INTERPRETED = ("no graphs, overlapping steps", "chunks of 5", "blocks of 64", "two at a time", "those of a real device")


@pytest.mark.parametrize("variant", choose(VARIANTS, *INTERPRETED))
def test_greedy_tokens_equal_the_cpu_engines(tiny: TinyLLM, cpu_tokens: list[list[int]], variant: str) -> None:
    llm = tiny.on_gpu(**VARIANTS[variant])
    assert all(result.tokens == cpu_tokens for result in run_often(llm))


@pytest.mark.parametrize("async_scheduling", choose([True, False], True))
def test_greedy_tokens_equal_the_cpu_engines_when_requests_have_to_give_way(
    tiny: TinyLLM, cpu: LLM, async_scheduling: bool
) -> None:
    """There are no more rows than requests, so who gives way must leave its row; its output counts when it is back."""
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    params = SamplingParams(temperature=0, max_tokens=7, frequency_penalty=1.0)
    llm = tiny.on_gpu(async_scheduling=async_scheduling, block_size=2, num_kv_blocks=6, max_num_seqs=3)
    outputs = generate(llm, prompts, params)
    assert tokens_of(outputs) == tokens_of(generate(cpu, prompts, params))
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) >= 3


def test_steps_are_padded_to_rungs_and_without_graphs_they_are_not(
    tiny: TinyLLM, cpu_tokens: list[list[int]], shapes: list[StepShape]
) -> None:
    llm = tiny.on_gpu(enable_prefix_caching=False)
    assert run(llm, PROMPTS[:3], 2).tokens == [tokens[:2] for tokens in cpu_tokens[:3]]
    assert shapes == [
        StepShape(16, 6, has_chunks=True),  # 3 + 1 + 9 tokens
        StepShape(4, 4, has_chunks=False),  # of 3 requests
    ]
    used = llm.engine.utilisation.stats
    assert (used.num_step_tokens, used.num_padding_tokens) == (13 + 3, 3 + 1)
    shapes.clear()
    assert run(llm, PROMPTS[:1], 2).tokens == [cpu_tokens[0][:2]]
    assert shapes == [
        StepShape(16, 6, has_chunks=True),  # without single tokens
        StepShape(1, 1, has_chunks=False),
    ]
    shapes.clear()
    run(tiny.on_gpu(enforce_eager=True), PROMPTS[:2], 2)
    assert shapes == []


def runner_of(llm: LLM) -> StepRunner[Any]:
    runner = llm.engine.core.executor._runner  # type: ignore[attr-defined]
    assert isinstance(runner, StepRunner)
    return runner


def stage_of(llm: LLM) -> GraphedStage:
    stage = runner_of(llm).stage
    assert isinstance(stage, GraphedStage)
    return stage


def test_steps_without_a_request_change_nothing(tiny: TinyLLM, cpu_tokens: list[list[int]]) -> None:
    """They are what graphs are captured with."""
    llm = tiny.on_gpu()
    expected = [tokens[:3] for tokens in cpu_tokens[:3]]
    assert run(llm, PROMPTS[:3], 3).tokens == expected  # rows, slots and tables hold something
    stage = stage_of(llm)
    caches = [tensor for layer in runner_of(llm).attention.kv_caches for tensor in layer.tensors]
    before = [tensor.clone() for tensor in caches]
    rows = stage.rows.token_rows.clone()
    stage.rows.stage_nothing()
    for shape in (StepShape(4, 4, has_chunks=False), StepShape(16, 6, has_chunks=True)):
        stage.run_shape(shape)
    assert all(torch.equal(tensor, was) for tensor, was in zip(caches, before, strict=True))
    assert torch.equal(stage.rows.token_rows, rows)
    assert run(llm, PROMPTS[:3], 3).tokens == expected


def test_every_step_has_one_of_the_shapes(tiny: TinyLLM, shapes: list[StepShape]) -> None:
    stage = stage_of(tiny.on_gpu(max_num_seqs=200, max_num_batched_tokens=300))
    known = set(stage.shapes())
    assert len(known) == len(stage.shapes())
    for num_tokens in range(1, 301):
        if num_tokens <= 200:
            padded = stage.padded(num_tokens, is_decode=True)
            assert StepShape(padded, padded, False) in known
        for num_samples in {1, min(num_tokens, 64), min(num_tokens, 65), min(num_tokens, 200)}:
            num_rows = next(rung for rung in (64, 200) if rung >= num_samples)
            assert StepShape(stage.padded(num_tokens, is_decode=False), num_rows, True) in known


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_warm_engine_captures_nothing_more(tiny: TinyLLM, cpu_tokens: list[list[int]]) -> None:
    llm = tiny.on_gpu()
    stage = stage_of(llm)
    assert stage._graphs is not None
    assert llm.engine.warm_up() == len(stage.shapes())
    assert set(stage._graphs._graphs) == set(stage.shapes())
    assert all(result.tokens == cpu_tokens for result in run_often(llm))
    assert set(stage._graphs._graphs) == set(stage.shapes())
    assert tiny.on_gpu(cuda_graph_capture="lazy").engine.warm_up() == 0


def test_too_little_memory_for_graphs_is_said_so(tiny: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self: GraphedStage) -> int:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    llm = tiny.on_gpu()
    assert ON_GPU or llm.engine.warm_up() == 0, "there is nothing to capture"
    monkeypatch.setattr(GraphedStage, "warm_up", no_room)
    with pytest.raises(
        ConfigError, match=r"--cuda-graph-capture lazy or --enforce-eager\. \(tried to allocate 2 GiB\)"
    ):
        llm.engine.warm_up()


def test_after_shutdown_nothing_is_submitted(tiny: TinyLLM) -> None:
    runner = runner_of(tiny.on_gpu())
    runner.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        runner.submit(SchedulerOutput.empty(0))


# ------------------------------------------------------------------------------------------ what is learnt a step late


def test_a_stop_token_ends_a_request_one_step_late_and_the_surplus_token_is_dropped(
    overlapped: LLM, cpu_tokens: list[list[int]], shapes: list[StepShape]
) -> None:
    tokens = cpu_tokens[0]
    place = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=[tokens[place]]),
        SamplingParams(temperature=0, max_tokens=place + 1),
    ]
    stopped, other = generate(overlapped, PROMPTS[:2], params)
    assert stopped.outputs[0].token_ids == tokens[: place + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", tokens[place])
    assert other.outputs[0].token_ids == cpu_tokens[1][: place + 1]
    overlapped.engine.core.drain()
    assert len(shapes) == place + 2, "the step that was on its way when the stop token came"
    assert shapes[-1].num_tokens == 1, "the one that ends by length is not in it"


def test_the_engine_goes_on_after_an_abort_with_steps_in_flight(overlapped: LLM, cpu_tokens: list[list[int]]) -> None:
    engine = overlapped.engine
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        done.update((output.request_id, output) for output in engine.step().outputs if output.finished)
        engine.check_invariants()

    for name, prompt in zip("abc", PROMPTS):
        engine.add_request(name, prompt, params)
    step()
    step()
    assert engine.core.scheduler.in_flight, "the abort comes while a step runs"
    for name, so_far in (("a", 2), ("c", 2)):
        aborted = engine.abort(name)
        assert aborted is not None and len(aborted.outputs[0].token_ids) == so_far
    # Two newcomers take over rows and blocks; one of them the name as well.
    engine.add_request("a", PROMPTS[2], params)
    engine.add_request("d", PROMPTS[3], params)
    while engine.has_unfinished_requests():
        step()
    assert {name: output.outputs[0].token_ids for name, output in done.items()} == {
        "a": cpu_tokens[2],
        "b": cpu_tokens[1],
        "d": cpu_tokens[3],
    }
    assert engine.core.scheduler.kv_cache.num_used_blocks == 0


# ---------------------------------------------------------------------------------------------- logprobs, seeds, errors


def values(positions: list[Any] | None, number: Callable[[float], Any] = float) -> Any:
    """Token, rank and logprob, over all positions."""
    return positions and [
        place and [(token, found.rank, number(found.logprob)) for token, found in place.items()] for place in positions
    ]


near = functools.partial(pytest.approx, abs=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_equal_the_cpu_engines(tiny: TinyLLM, cpu: LLM, pooling: str) -> None:
    llm = tiny.on_gpu(async_scheduling=True, max_chunk_tokens=4)
    pairs = zip(cpu.embed(PROMPTS[:3], pooling=pooling), llm.embed(PROMPTS[:3], pooling=pooling), strict=True)
    for right, found in pairs:
        assert found.outputs.embedding == pytest.approx(right.outputs.embedding, abs=1e-4)


def test_logprobs_equal_the_cpu_engines(tiny: TinyLLM, cpu: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=3, logprobs=2),
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=2, logprobs=0, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=2),
    ]
    prompts = [PROMPTS[0], PROMPTS[2], *PROMPTS[:2]]
    llm = tiny.on_gpu(async_scheduling=True, max_chunk_tokens=4)
    for expected, output in zip(generate(cpu, prompts, params), generate(llm, prompts, params), strict=True):
        assert values(output.outputs[0].logprobs) == values(expected.outputs[0].logprobs, near)
        assert values(output.prompt_logprobs) == values(expected.prompt_logprobs, near)


def test_in_16_bit_logprobs_have_the_error_of_the_format(tiny: TinyLLM, cpu: LLM) -> None:
    """Few rows of a 16-bit model go through kernels of their own: a single one, and a few."""
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0)
    llm = tiny.on_gpu(dtype="float16")
    for prompts in (PROMPTS[:1], [PROMPTS[0], PROMPTS[2]]):
        for expected, output in zip(generate(cpu, prompts, params), generate(llm, prompts, params), strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.outputs[0].cumulative_logprob == pytest.approx(
                expected.outputs[0].cumulative_logprob, abs=0.05
            )


def test_requests_without_a_seed_draw_each_for_itself(overlapped: LLM) -> None:
    no_seed = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    first, second = tokens_of(generate(overlapped, [PROMPTS[1]] * 2, no_seed))
    assert first != second


def test_sampled_tokens_equal_the_cpu_engines(cpu: LLM, overlapped: LLM) -> None:
    """Penalties and bans count tokens that the host does not know yet."""
    own = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    greedy = {"max_tokens": NUM_TOKENS, "temperature": 0}
    params = [
        SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, **own),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=8, **own),
        SamplingParams(temperature=1.3, min_p=0.02, frequency_penalty=0.5, presence_penalty=0.3, seed=9, **own),
        SamplingParams(temperature=0.9, logit_bias={3: 2.0}, min_tokens=3, stop_token_ids=[5], seed=10, **own),
        SamplingParams(repetition_penalty=3.0, **greedy),
        SamplingParams(frequency_penalty=2.0, presence_penalty=2.0, **greedy),
        SamplingParams(logit_bias={7: 100.0}, stop_token_ids=[7], min_tokens=3, **greedy),
    ]
    prompts = [*PROMPTS, *PROMPTS[:3]]
    expected = tokens_of(generate(cpu, prompts, params))
    assert len(expected[-1]) == 4 and expected[-1][-1] == 7
    assert tokens_of(generate(overlapped, prompts, params)) == expected


def test_a_request_with_broken_logits_fails_and_the_others_go_on(tiny: TinyLLM, cpu_tokens: list[list[int]]) -> None:
    poison = next(token for token in range(VOCAB_SIZE) if all(token not in line for line in [*PROMPTS, *cpu_tokens]))
    llm = tiny.on_gpu(async_scheduling=True, num_kv_blocks=6)
    runner_of(llm).decoder.embedding[poison] = float("nan")
    params = SamplingParams(temperature=0, max_tokens=3)
    for name, prompt in (("a", PROMPTS[0]), ("broken", [5, poison, 6]), ("b", PROMPTS[1])):
        llm.engine.add_request(name, prompt, params, stream=False)
    done, errors = finish_all(llm)
    assert done["broken"].finish_reason == "error"
    assert "nan" in errors["broken"]
    assert [done[name].token_ids for name in "ab"] == [tokens[:3] for tokens in cpu_tokens[:2]]
    # What it left behind in blocks that others get now is not read.
    assert tokens_of(generate(llm, PROMPTS[:3], params)) == [tokens[:3] for tokens in cpu_tokens[:3]]


def test_a_step_that_cannot_be_launched_ends_its_requests_and_the_engine_goes_on(
    tiny: TinyLLM, cpu_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny.on_gpu(async_scheduling=True, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=2)

    def no_memory(self: TritonPagedAttention, layer: int, q: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(TritonPagedAttention, "run", no_memory)
        with pytest.raises(RequestFailedError, match="no memory"):
            llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert tokens_of(generate(llm, PROMPTS[:2], params)) == [tokens[:2] for tokens in cpu_tokens[:2]]


def test_a_dropped_engine_gives_its_memory_back_at_once(tiny: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the garbage collector comes: the next engine may need it."""
    runners: list[weakref.ref[StepRunner[Any]]] = []
    submit = StepRunner.submit

    def spy(self: StepRunner[Any], output: SchedulerOutput) -> PendingStep:
        runners.append(weakref.ref(self))
        return submit(self, output)

    monkeypatch.setattr(StepRunner, "submit", spy)
    llm = tiny.on_gpu(async_scheduling=True)
    generate(llm, PROMPTS[1:2], SamplingParams(temperature=0, max_tokens=1))
    assert runners[0]() is not None
    del llm
    assert runners[0]() is None
