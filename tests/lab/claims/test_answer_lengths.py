"""Lengths of answers: how they are sampled, what their spread is, and those that are part of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.executor.fake import FakeExecutor
from headway_lab.claims.answer_lengths import (
    PROMPTS,
    SAMPLINGS,
    Answers,
    Recorded,
    Sampling,
    measure_answers,
    num_answers,
    recorded,
)
from headway_lab.claims.context import Infeasible
from headway_lab.claims.scenarios.sampling_spread import gain_of
from headway_lab.claims.testbed import SimulatedTestbed
from tests.lab.claims.small import tiny_options, tiny_testbed
from tests.unit.no_model import engine_on
from tests.unit.structured.matching import embedded_tokenizer

MAX_TOKENS = 30


def answers_of(*lengths: list[int], max_tokens: int = 100) -> Answers:
    return Answers(Sampling(1.0, 1.0), [10] * len(lengths), lengths, max_tokens)


@pytest.mark.parametrize(
    ("lengths", "mean", "spread", "of_a_prompt", "cut"),
    [
        ([[50, 50], [50, 50]], 50, 0.0, 0.0, 0.0),
        ([[20, 20], [60, 60]], 40, 0.5, 0.0, 0.0),
        ([[20, 60], [20, 60]], 40, 0.5, 0.5, 0.0),
        ([[100, 100], [50, 150]], 100, 2**-0.5 / 2, 2**-0.5 / 2, 0.75),
    ],
)
def test_the_spread_over_all_answers_and_between_those_to_one_prompt(
    lengths: list[list[int]], mean: float, spread: float, of_a_prompt: float, cut: float
) -> None:
    answers = answers_of(*lengths)
    assert (answers.mean, answers.share_cut) == (mean, cut)
    assert answers.spread == pytest.approx(spread) and answers.spread_of_a_prompt == pytest.approx(of_a_prompt)
    assert len(answers.sizes) == sum(map(len, lengths))


def test_each_sample_of_each_prompt_is_answered_to_its_own_end() -> None:
    tokenizer = embedded_tokenizer()
    [eos, *_] = tokenizer.eos_token_ids
    num_in: dict[str, int] = {}

    def length(name: str) -> int:
        way, place, sample = map(int, name.split("/"))
        return 3 + 5 * way + 2 * place + sample

    def next_token(name: str, num_tokens: int) -> int:
        first = num_in.setdefault(name, num_tokens)
        return eos if num_tokens - first + 1 == length(name) else 17

    engine = engine_on(
        FakeExecutor(next_token), num_blocks=2000, max_model_len=256, vocab_size=49152, tokenizer=tokenizer
    )
    found = measure_answers(engine, num_prompts=3, num_samples=2, max_tokens=MAX_TOKENS)
    assert [answers.sampling for answers in found] == list(SAMPLINGS)
    for way, answers in enumerate(found):
        samples = (0, 0) if answers.sampling.temperature == 0 else (0, 1)
        assert answers.lengths == [
            [min(length(f"{way}/{place}/{sample}"), MAX_TOKENS) for sample in samples] for place in range(3)
        ]
        assert len(answers.num_prompt_tokens) == 3 and min(answers.num_prompt_tokens) > 5
    assert len(num_in) == num_answers(3, 2)


def test_random_weights_have_no_answers(tmp_path: Path) -> None:
    testbed = tiny_testbed(**tiny_options(tmp_path))
    with pytest.raises(Infeasible, match="choose a chat model"):
        measure_answers(testbed.engine(), num_prompts=2, num_samples=2, max_tokens=8)
    testbed.close()


def test_the_packages_lengths_are_whole() -> None:
    found = recorded()
    assert [answers.sampling for answers in found.answers] == list(SAMPLINGS)
    for answers in found.answers:
        assert len(answers.lengths) == len(answers.num_prompt_tokens) == len(PROMPTS)
        assert all(0 < length <= answers.max_tokens for length in answers.flat)
        assert len({len(samples) for samples in answers.lengths}) == 1
        assert (answers.spread_of_a_prompt == 0) == (answers.sampling.temperature == 0)
    assert "SmolLM2" in found.origin
    assert Recorded.from_json(found.as_json()) == found


def test_the_gain_grows_with_the_spread() -> None:
    place = SimulatedTestbed.open()
    alike, apart = answers_of([50] * 20), answers_of([10] * 19 + [810], max_tokens=1000)
    assert alike.mean == apart.mean
    assert gain_of(place, alike) < 1.2 < 2 < gain_of(place, apart)
