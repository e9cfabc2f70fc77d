"""Static and dynamic batching give the answers of continuous batching, however they end; only later."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from headway.engine.llm_engine import LLMEngine
from headway.outputs import CompletionOutput
from headway.sampling_params import SamplingParams
from tests.unit.engine.scripted_logprobs import VOCAB_SIZE, make_engine, run_to_end
from tests.unit.engine_process.small_engine import small_tokenizer

TOKENIZER = small_tokenizer()
LETTERS = [TOKENIZER.decode([token_id]) for token_id in range(3, VOCAB_SIZE)]
Job = tuple[list[int], SamplingParams]

sealed = pytest.mark.parametrize("batching", ["static", "dynamic"])
overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])


def engine_of(batching: str, **options: Any) -> LLMEngine:
    small = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "batch_window_ms": 0.0}
    return make_engine(batching=batching, tokenizer=TOKENIZER, **{**small, **options})


def answers(engine: LLMEngine, jobs: list[Job], *, streams: bool = False) -> list[list[CompletionOutput]]:
    for index, (prompt, params) in enumerate(jobs):
        engine.add_request(str(index), prompt, params, stream="full" if streams and params.can_stream else False)
    errors: dict[str, str] = {}
    outputs = run_to_end(engine, errors)
    assert not errors
    return [outputs[str(index)].outputs for index in range(len(jobs))]


def random_job(rng: random.Random) -> Job:
    """Any way to end: the model's end token, a stop token, a stop string, the length; and what else changes outputs."""
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
    max_tokens = rng.randint(1, 12)
    common: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": rng.random() < 0.4,
        "stop_token_ids": rng.sample(range(3, VOCAB_SIZE), rng.choice([0, 0, 1, 2])),
        "include_stop_str_in_output": rng.random() < 0.3,
    }
    if rng.random() < 0.2:
        return prompt, SamplingParams(**common, n=rng.randint(1, 3), best_of=3, use_beam_search=True)
    stops = ["".join(rng.choices(LETTERS, k=rng.choice([1, 1, 2]))) for _ in range(rng.choice([0, 0, 1, 2]))]
    temperature = rng.choice([0.0, 1.0])
    return prompt, SamplingParams(
        **{**common, "temperature": temperature},
        n=rng.choice([1, 1, 3]) if temperature else 1,
        stop=stops or None,
        min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
        logprobs=rng.choice([None, None, 2]),
    )


@overlaps
@sealed
@pytest.mark.parametrize("seed", range(6))
def test_every_end_is_that_of_continuous_batching(seed: int, batching: str, overlap: bool) -> None:
    rng = random.Random(seed)
    jobs = [random_job(rng) for _ in range(24)]
    expected = answers(engine_of("continuous"), jobs)
    ends = Counter((each.finish_reason, type(each.stop_reason)) for outputs in expected for each in outputs)
    assert answers(engine_of(batching, overlap=overlap), jobs) == expected
    assert answers(engine_of(batching, overlap=overlap, num_blocks=16, max_num_seqs=3), jobs) == expected
    assert answers(engine_of(batching, overlap=overlap), jobs, streams=True) == expected
    assert len(ends) >= 3, "the test has lost its cases"


@sealed
def test_answers_of_a_batch_end_together_whatever_ended_them(batching: str) -> None:
    """Also one that a stop string has ended: place and memory are kept until the batch is done."""
    engine = engine_of(batching)
    common: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    ((free,),) = answers(engine_of("continuous"), [([7], SamplingParams(max_tokens=20, **common))])
    engine.add_request("string", [7], SamplingParams(max_tokens=20, stop=[free.text[2]], **common), stream=False)
    engine.add_request("token", [7], SamplingParams(max_tokens=20, stop_token_ids=free.token_ids[2:3], **common))
    engine.add_request("length", [7], SamplingParams(max_tokens=2, **common), stream=False)
    engine.add_request("longest", [7], SamplingParams(max_tokens=20, **common), stream=False)
    ends: list[set[str]] = []
    num_in_batch: list[int] = []
    while engine.has_unfinished_requests():
        ends.append({output.request_id for output in engine.step().outputs if output.finished})
        scheduler = engine.core.scheduler
        num_in_batch.append(len(scheduler.in_batch))
        engine.check_invariants()
    assert [end for end in ends if end] == [{"string", "token", "length", "longest"}]
    assert set(num_in_batch[:-1]) == {4}


@overlaps
@sealed
def test_a_request_that_has_its_last_token_may_still_be_aborted(batching: str, overlap: bool) -> None:
    engine = engine_of(batching, overlap=overlap)
    for name, params in (
        ("short", SamplingParams(temperature=0, max_tokens=1)),
        ("long", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
    ):
        engine.add_request(name, [7], params, stream=False)
    for _ in range(3):
        engine.step()
    last = engine.abort("short")
    assert last is not None and last.finished
    assert (len(last.outputs[0].token_ids), last.outputs[0].finish_reason) == (1, "abort")
    outputs = run_to_end(engine)
    assert set(outputs) == {"long"}


@sealed
def test_a_search_goes_on_in_the_batch_that_it_is_in_and_others_wait_for_its_end(batching: str) -> None:
    engine = engine_of(batching)
    search = SamplingParams(temperature=0, max_tokens=6, n=2, best_of=2, use_beam_search=True, ignore_eos=True)
    engine.add_request("search", [7, 8], search, stream=False)
    engine.add_request("beside", [7, 8], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), stream=False)
    engine.step()
    engine.add_request("later", [7, 8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), stream=False)
    begun: list[tuple[int, str]] = []
    ended: list[str] = []
    num_steps = 1
    while engine.has_unfinished_requests():
        step = engine.step()
        ended += [output.request_id for output in step.outputs if output.finished]
        begun += [(num_steps, request_id) for request_id in step.begun]
        num_steps += 1
        engine.check_invariants()
    assert [name for _, name in begun] == ["later"]
    assert begun[0][0] >= 6, "it has entered a sealed batch"
    assert ended.index("search") < ended.index("later")
    assert ended.index("beside") < ended.index("later")
