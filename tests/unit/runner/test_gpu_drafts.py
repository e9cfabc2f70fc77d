"""Drafts on the GPU runner: whatever is guessed, the tokens of the plain CPU engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_device import DEVICE, ON_GPU, choose  # isort: split

from headway import LLM, RequestOutput, SamplingParams
from headway.core import Request
from headway.core.proposers import Draft, NgramProposer
from headway.core.speculation import _Level
from headway.errors import ConfigError
from headway.runner.device_rows import DeviceRows
from tests.unit.runner.tiny_llm import VOCAB_SIZE, TinyLLM, random_prompts

PROMPTS = random_prompts(3, 1, 9, 2, 5)
# Where steps overlap the device guesses, by what has been before: of few different tokens some are right.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2, "logit_bias": {"7": 90.0}},
    {
        "temperature": 1.0,
        "seed": 4,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"7": 60, "8": 60},
    },
    {"temperature": 1.2, "seed": 3, "frequency_penalty": 0.3, "top_p": 0.9, "logit_bias": {"5": 60, "6": 60.5}},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": list(range(0, VOCAB_SIZE, 3)), "logit_bias": {"7": 3.0}},
    {"temperature": 0.8, "seed": 9, "top_k": 20, "logprobs": 0},
]
VARIANTS: dict[str, dict[str, Any]] = {
    "overlapping steps": {"async_scheduling": True},
    "one step after the other, no graphs": {"enforce_eager": True},
    "chunks of 3, blocks of 1": {"max_chunk_tokens": 3, "block_size": 1, "async_scheduling": True},
    "a cache that is too small": {"block_size": 2, "num_kv_blocks": 14, "async_scheduling": True},
    "one at a time": {"max_num_seqs": 1},
}


class KnowingProposer:
    """Guesses that are right now and then: it is told how answers go on, and damages some of that."""

    prior_chance = 0.5
    knows_tokens = True

    def __init__(self, answers: Sequence[tuple[int, ...]], seed: int) -> None:
        self.answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
        self.rng = random.Random(seed)

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        after = self.answers[request.prompt_token_ids][request.num_output_tokens :][
            : self.rng.randrange(max_tokens + 1)
        ]
        damaged = [token if self.rng.random() < 0.6 else self.rng.randrange(VOCAB_SIZE) for token in after]
        return Draft(tuple(damaged), 8) if damaged else None

    def note_verified(self, request: Request) -> None:
        pass

    def forget_finished(self) -> None:
        pass


def generate(llm: LLM) -> list[tuple[tuple[int, ...], Any]]:
    params = [SamplingParams(max_tokens=18, **options) for options in PARAMS]
    outputs: list[RequestOutput] = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.engine.check_invariants()
    assert llm.engine.core.scheduler.kv_cache.num_used_blocks == 0
    return [(tuple(output.outputs[0].token_ids), ranks(output)) for output in outputs]


def ranks(output: RequestOutput) -> Any:
    return [{token: found.rank for token, found in place.items()} for place in output.outputs[0].logprobs or ()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLLM:
    smaller = {} if ON_GPU else {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return TinyLLM(tmp_path_factory.mktemp("tiny"), **smaller)


@pytest.fixture(scope="module")
def expected(tiny: TinyLLM) -> list[tuple[tuple[int, ...], Any]]:
    return generate(tiny.on_cpu())


def guesses_of(llm: LLM, expected: list[Any]) -> tuple[int, int]:
    """How many guesses were right and wrong, with any number of them, and often some, whatever it costs."""
    speculation, rng = llm.engine.core.scheduler.speculation, random.Random(2)
    assert speculation is not None

    def num_worth(levels: Sequence[_Level], *, most: int, **_: object) -> int:
        most = max(0, min(sum(level.num_guesses for level in levels), most))
        return rng.randint(1, most) if most and rng.random() < 0.8 else 0

    speculation._num_worth = num_worth  # type: ignore[method-assign]
    speculation._cost.wants_plain = lambda num_rows: False  # type: ignore[method-assign]
    for _ in range(3 if ON_GPU else 1):
        assert generate(llm) == expected
    stats = speculation.stats
    return stats.num_accepted_tokens, stats.num_draft_tokens - stats.num_accepted_tokens


@pytest.mark.parametrize(
    "variant",
    choose(VARIANTS, "one step after the other, no graphs", "chunks of 3, blocks of 1", "a cache that is too small"),
)
def test_the_same_tokens_as_the_cpu_engine(tiny: TinyLLM, expected: list[Any], variant: str) -> None:
    llm = tiny.on_gpu(speculation="ngram", max_draft_tokens=4, **VARIANTS[variant])
    speculation = llm.engine.core.scheduler.speculation
    assert speculation is not None
    speculation._proposer = KnowingProposer([tokens for tokens, _ in expected], seed=1)
    num_right, num_wrong = guesses_of(llm, expected)
    assert num_right >= 3 and num_wrong >= 1


DRAFT_VARIANTS: dict[str, dict[str, Any]] = {
    "on the CPU": {"on": "cpu"},
    "on the CPU, a cache that is too small": {"on": "cpu", "block_size": 2, "num_kv_blocks": 14},
    "on the CPU, blocks on the host": {"on": "cpu", "block_size": 2, "num_kv_blocks": 14, "host_cache_memory": 2**20},
    "on the CPU, chunks of 3, six tokens a step": {"on": "cpu", "max_chunk_tokens": 3, "max_num_batched_tokens": 6},
    "overlapping steps": {"on": "gpu", "async_scheduling": True},
    "no graphs": {"on": "gpu", "enforce_eager": True},
    "a cache that is too small": {"on": "gpu", "block_size": 2, "num_kv_blocks": 14},
    "chunks of 3, blocks of 1": {"on": "gpu", "max_chunk_tokens": 3, "block_size": 1, "async_scheduling": True},
}


ON_THE_CPU = [variant for variant in DRAFT_VARIANTS if variant.startswith("on the CPU")]
SAME, OTHER = "the model itself", "another model"


@pytest.mark.parametrize(
    ("draft_model", "variant"),
    choose(
        list(itertools.product((SAME, OTHER), DRAFT_VARIANTS)),
        *itertools.product((SAME, OTHER), ON_THE_CPU),
        (SAME, "no graphs"),
        (OTHER, "a cache that is too small"),
        (OTHER, "chunks of 3, blocks of 1"),
    ),
)
def test_a_draft_model_changes_no_token(
    tiny: TinyLLM, expected: list[Any], tmp_path: Path, draft_model: str, variant: str
) -> None:
    """The model itself guesses right always, another one where tokens are likely enough."""
    options, same = DRAFT_VARIANTS[variant].copy(), draft_model == SAME
    make = tiny.on_cpu if options.pop("on") == "cpu" else tiny.on_gpu
    draft = (
        tiny
        if same
        else TinyLLM(tmp_path, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    )
    llm = make(speculation="draft", draft_model=str(draft.path), max_draft_tokens=4, max_num_seqs=6, **options)
    speculation = llm.engine.core.scheduler.speculation
    assert speculation is not None and not speculation.is_ahead
    num_right, num_wrong = guesses_of(llm, expected)
    assert num_right >= 5
    if same:
        # But for tokens that were computed in another order, and rounded differently.
        assert num_wrong <= num_right / 9
    else:
        assert num_wrong >= 5


def test_what_does_not_go_with_a_draft_model(tiny: TinyLLM, tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    other = str(TinyLLM(tmp_path, vocab_size=VOCAB_SIZE + 1).path)
    short = str(TinyLLM(tmp_path / "short", max_model_len=32).path)
    own = str(tiny.path)
    for speculation, options, message in (
        ("draft", {"draft_model": other}, "199: a model can only guess for one with the same vocabulary"),
        ("draft", {"draft_model": short}, "32 positions, fewer than requests may have"),
        ("draft", {}, "give draft_model"),
        ("ngram", {"draft_model": own}, "speculation is 'ngram'; use 'draft'"),
        ("draft", {"draft_model": own, "spec_synthetic_acceptance": 2.0}, "makes guesses up, and a draft model"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny.on_cpu(speculation=speculation, **options)


def test_synthetic_acceptance_is_about_what_was_asked_for(tiny: TinyLLM) -> None:
    llm = tiny.on_gpu(speculation="ngram", max_draft_tokens=3, spec_synthetic_acceptance=2.5, async_scheduling=True)
    speculation = llm.engine.core.scheduler.speculation
    assert speculation is not None
    speculation._num_worth = lambda levels, *, most, **_: min(  # type: ignore[method-assign]
        sum(level.num_guesses for level in levels), most
    )
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert len(output.outputs[0].token_ids) == 30
    stats = speculation.stats
    full = [at / speculation.stats.num_accepted_at[0] for at in speculation.stats.num_accepted_at]
    assert stats.num_drafts >= 20
    assert 0.4 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.75
    assert full[0] >= full[1] >= full[2] > 0


def test_the_device_guesses_what_the_host_would() -> None:
    rng = random.Random(4)
    num_rows, num_drafts = 24, 5
    rows = DeviceRows(
        max_num_seqs=num_rows,
        max_num_lines=num_rows * (1 + num_drafts),
        max_model_len=2200,
        block_size=16,
        max_num_tokens=256,
        device=DEVICE,
        division=None,
    )
    answers = [[rng.randrange(rng.choice([2, 4, 9])) for _ in range(rng.choice([1, 2, 30, 60]))] for _ in range(22)]
    far = [1, 2, 3, *range(10, 2000), 1, 2, 3]  # in another tile
    answers += [far, [*range(1500), 7, 8, *range(1500, 1600), 7, 8]]
    entries = []
    for row, tokens in enumerate(answers):
        rows.token_rows[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        rows.lengths[row] = len(tokens)
        entries += [(row, place, -1 if row % 3 else 100 + place) for place in range(num_drafts)]
    start = rows._drafts_start
    rows._staged[start : start + 3 * len(entries)] = torch.tensor(entries, dtype=torch.int32).ravel()
    rows._put_drafts(len(entries))
    num_found = 0
    for row, tokens in enumerate(answers):
        written = rows.token_rows[row, len(tokens) : len(tokens) + num_drafts].tolist()
        found = NgramProposer().propose(Request("r", tokens, max_tokens=9), num_drafts)
        num_found += found is not None
        if row % 3 == 0:
            assert written == [100 + place for place in range(num_drafts)]
        elif found is None:
            assert written == [tokens[-1]] * num_drafts
        else:
            assert written == list(found.token_ids), row
        assert rows.token_rows[row, : len(tokens)].tolist() == tokens
    assert 5 < num_found < len(answers)
