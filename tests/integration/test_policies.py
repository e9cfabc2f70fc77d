"""Policies and modes change who waits for whom, and nothing else: greedy tokens in float32 are those of each request
alone, in a cache so small that requests have to give way, with tenants, targets and predictions that mean nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from headway import LLM
from headway.config import PREFILL_MODES, SCHEDULING_POLICIES
from headway.core.policy import by_length
from headway.core.request_options import RequestOptions
from headway.predict.ranker_file import save_ranker
from headway_lab.predictor.training import train_ranker
from tests.integration.conversations import Alone, Conversations
from tests.unit.predict.traffic import make_traffic
from tests.unit.runner.tiny_llm import MAX_MODEL_LEN, VOCAB_SIZE, TinyLLM

MAX_TOKENS = 20
TOO_SMALL: dict[str, Any] = {"block_size": 2, "num_kv_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 16}


class ManyKinds(Conversations):
    """Requests that say all that a policy could want to know."""

    def _options(self) -> RequestOptions:
        rng = self.rng
        return dataclasses.replace(
            super()._options(),
            priority=rng.randint(0, 2),
            tenant=rng.choice("abc"),
            predicted_tokens=rng.choice([None, rng.uniform(1, 60)]),
            ttft_target_s=rng.choice([None, rng.uniform(0.001, 0.02)]),
            tpot_target_s=rng.choice([None, 0.001]),
        )


def modes() -> Iterator[dict[str, str]]:
    for policy, batching, prefill in product(SCHEDULING_POLICIES, ("continuous", "static"), PREFILL_MODES):
        yield {"scheduling_policy": policy, "batching": batching, "prefill_mode": prefill}
    for prefill in PREFILL_MODES:
        yield {"scheduling_policy": "fcfs", "batching": "dynamic", "prefill_mode": prefill}


def overlaps(mode: dict[str, str]) -> tuple[bool, ...]:
    """Whether steps overlap. In sealed batches this meets every policy and every prefill mode, but not every pair."""
    if mode["batching"] == "continuous":
        return False, True
    place = SCHEDULING_POLICIES.index(mode["scheduling_policy"]) + PREFILL_MODES.index(mode["prefill_mode"])
    return (place % 2 == 1,)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLLM:
    return TinyLLM(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(tiny: TinyLLM) -> Alone:
    return Alone(tiny.on_cpu(enable_prefix_caching=False), MAX_TOKENS)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without one the policy `ltr` is refused. It has learned from other prompts."""
    path = tmp_path_factory.mktemp("predictor") / "lengths.model"
    save_ranker(train_ranker([sample.record for sample in make_traffic(150)], objectives=["regression"]).model, path)
    return str(path)


def needs(policy: str, predictor: str) -> dict[str, str]:
    return {"length_predictor": predictor} if policy == "ltr" else {}


def check(llm: LLM, alone: Alone, seed: int = 0) -> int:
    """Returns how many requests had to give way."""
    talk = ManyKinds(llm, random.Random(seed), vocab_size=VOCAB_SIZE, max_prompt=18, max_tokens=MAX_TOKENS)
    turns = talk.run(10)
    alone.check(turns)
    assert sum(turn.finished for turn in turns) >= 5
    return sum(turn.num_preemptions > 0 for turn in turns)


@pytest.mark.parametrize("mode", [*modes()], ids=lambda mode: " ".join(mode.values()))
def test_tokens_are_those_of_each_request_alone(
    tiny: TinyLLM, alone: Alone, predictor: str, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without overlap and with it; and levels so small that requests sink."""
    monkeypatch.setattr(by_length, "FIRST_QUANTUM", 3)
    num_preempted, more = 0, needs(mode["scheduling_policy"], predictor)
    for async_scheduling in overlaps(mode):
        llm = tiny.on_cpu(
            async_scheduling=async_scheduling, batch_window_ms=1, starvation_ms=2, **mode, **more, **TOO_SMALL
        )
        num_preempted += check(llm, alone)
    if mode["batching"] == "continuous" and mode["prefill_mode"] != "decode-first":
        assert num_preempted, "nothing of what this test is about has happened"


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_where_memory_is_given_out_for_the_longest_answer(
    tiny: TinyLLM, alone: Alone, predictor: str, policy: str
) -> None:
    options = {**TOO_SMALL, "num_kv_blocks": MAX_MODEL_LEN, "kv_allocation": "contiguous-max"}
    check(tiny.on_cpu(scheduling_policy=policy, **needs(policy, predictor), **options), alone)
