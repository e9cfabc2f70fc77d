"""transformers' `generate` beside the engine: the same model, as many tokens, and what happens without transformers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_lab.claims.context import Context, Infeasible
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.claims.testbed import EngineTestbed
from headway_lab.claims.transformers_loop import TransformersLoop
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.bench.test_offline_bench import SHAPE
from tests.lab.claims.small import tiny_options, tiny_testbed

WORK = [BenchRequest([5] * num_in, num_out) for num_in, num_out in ((3, 4), (7, 2), (2, 6))]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[EngineTestbed]:
    testbed = tiny_testbed(**tiny_options(tmp_path))
    yield testbed
    testbed.close()


class Counting:
    """A model that notes what it is asked for, and gives `more` tokens than that."""

    def __init__(self, more: int = 0) -> None:
        self.calls: list[tuple[list[list[int]], list[list[int]], int]] = []
        self._more = more

    def generate(self, ids: torch.Tensor, *, attention_mask: torch.Tensor, max_new_tokens: int, **_: Any) -> Any:
        self.calls.append((ids.tolist(), attention_mask.tolist(), max_new_tokens))
        return torch.zeros(ids.shape[0], ids.shape[1] + max_new_tokens + self._more)


def test_a_batch_is_padded_on_the_left_and_goes_on_to_the_longest_answer() -> None:
    model = Counting()
    loop = TransformersLoop(model, "cpu")
    loop.seconds(WORK, 2)
    assert model.calls == [
        ([[0, 0, 0, 0, 5, 5, 5], [5] * 7], [[0, 0, 0, 0, 1, 1, 1], [1] * 7], 4),
        ([[5, 5]], [[1, 1]], 6),
    ]
    assert loop.warm_up(WORK[0], 3) in (1, torch.get_num_threads())
    assert [num_new for _, _, num_new in model.calls[2:]] == [3] * (len(model.calls) - 2)
    with pytest.raises(RuntimeError, match="transformers made"):
        TransformersLoop(Counting(more=-1), "cpu").seconds(WORK, 1)


def test_the_loop_has_the_shape_of_the_engines_model(tiny: EngineTestbed) -> None:
    engine = tiny.engine()
    loop = TransformersLoop.load(engine.config.model, device="cpu", dtype="float32")
    config, own = loop.model.config, engine.model_config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (
        own.vocab_size,
        own.hidden_size,
        own.num_layers,
        own.intermediate_size,
    )
    assert loop.seconds(WORK, 2) > 0


def test_a_model_that_transformers_does_not_know_is_said(tmp_path: Path, tiny: EngineTestbed) -> None:
    (tmp_path / "odd.json").write_text(json.dumps({**SHAPE, "architectures": ["NoSuchForCausalLM"]}))
    model = dataclasses.replace(tiny.engine().config.model, model=str(tmp_path / "odd.json"))
    with pytest.raises(Infeasible, match="transformers cannot load this model"):
        TransformersLoop.load(model, device="cpu", dtype="float32")


def test_without_transformers_it_says_what_to_install(tiny: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else find(name))
    with pytest.raises(Infeasible, match=r"not installed: run '.*install.*transformers"):
        CLAIMS["naive-loop"].measure(Context(tiny, is_quick=True))


def test_the_gain_is_the_product_of_program_and_batching(tiny: EngineTestbed) -> None:
    outcome = CLAIMS["naive-loop"].measure(Context(tiny, is_quick=True))
    rates = {name: numbers["output tokens/s"] for name, numbers in outcome.numbers.items()}
    assert list(rates) == [
        f"{program}, {way}"
        for program, ways in (
            ("transformers", ("one at a time", "fixed batches")),
            ("Headway", ("one at a time", "fixed batches", "continuous batching")),
        )
        for way in ways
    ]
    assert outcome.value == pytest.approx(rates["Headway, continuous batching"] / rates["transformers, one at a time"])
    assert outcome.where == "engine" and "transformers computes in float32" in outcome.differs
    assert outcome.chart.svg().count("<rect") >= 5
