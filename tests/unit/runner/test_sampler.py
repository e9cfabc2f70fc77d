"""Sampling on the CPU over many draws and steps: distributions, batches, and what changes as tokens come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.runner import cpu_sampling
from headway.runner.sampler import NO_TOKEN
from headway.sampling_params import SamplingParams
from tests.unit.runner import sampling_reference as reference
from tests.unit.runner.sampling_bench import EOS, ON_CPU, Bench, sample_once
from tests.unit.runner.sampling_reference import Request

GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(params=ON_CPU)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_request(rng: np.random.Generator, vocab: int) -> Request:
    fields: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.8])),
        "seed": None if rng.random() < 0.3 else int(rng.integers(-(2**62), 2**62)),
    }
    output = rng.integers(0, vocab, rng.integers(0, 9)).tolist()
    options: dict[str, Any] = {
        "top_k": int(rng.choice([-1, 1, 3, 10, vocab // 2, vocab, 5 * vocab])),
        "top_p": float(rng.choice([1e-6, 0.3, 0.9, 0.999])),
        "min_p": float(rng.choice([0.02, 0.3, 1.0])),
        "repetition_penalty": float(rng.choice([0.6, 1.3, 5.0])),
        "frequency_penalty": float(rng.choice([-1.5, 0.7, 2.0])),
        "presence_penalty": float(rng.choice([-2.0, 0.4, 2.0])),
        "logit_bias": {int(t): float(b) for t, b in zip(rng.integers(0, vocab, 4), rng.uniform(-100, 100, 4))},
        "min_tokens": int(rng.integers(0, 9)),
        "stop_token_ids": rng.integers(0, vocab, 3).tolist(),
    }
    bad = [rng.integers(0, vocab, rng.integers(1, 4)).tolist() for _ in range(3)]
    bad += [[*output[-1:], int(rng.integers(0, vocab))]]
    for name in rng.choice(list(options), rng.integers(0, 6), replace=False):
        fields[str(name)] = options[name]
    return Request(
        fields,
        prompt=rng.integers(0, vocab, rng.integers(1, 12)).tolist(),
        output=output,
        default_seed=int(rng.integers(0, 2**62)),
        bad=bad if rng.random() < 0.5 else None,
    )


@pytest.mark.parametrize("vocab", [5, 64, 1000])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_random_requests_draw_what_brute_force_draws(kernels: str, vocab: int, scale: float) -> None:
    rng = np.random.default_rng([vocab, int(scale)])
    requests = [random_request(rng, vocab) for _ in range(150)]
    logits = (rng.standard_normal((len(requests), vocab)) * scale).astype(np.float32)
    before = [request.copy() for request in requests]
    result = sample_once(kernels, torch.from_numpy(logits), requests)
    wide = logits.astype(np.float64)
    impossible = {i for i, request in enumerate(before) if reference.edited(wide[i], request, EOS).max() == -np.inf}
    assert set(result.errors) == impossible
    for place in set(range(len(before))) - impossible:
        assert result.token_ids[place] in reference.expected_tokens(wide[place], before[place], EOS), before[place]


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 2.0}, {"top_k": 9, "top_p": 0.7, "min_p": 0.01}],
    ids=str,
)
def test_draws_follow_the_distribution(kernels: str, fields: dict[str, Any]) -> None:
    """Chi-square of 6,000 draws with distinct seeds: below the 99.99% quantile."""
    line = np.linspace(-2, 3, 16, dtype=np.float32)[np.random.default_rng(5).permutation(16)]
    num_draws = 6_000
    lines = torch.from_numpy(np.broadcast_to(line, (num_draws, 16)).copy())
    tokens = sample_once(kernels, lines, [Request({**fields, "seed": seed}) for seed in range(num_draws)]).token_ids
    params = SamplingParams(**fields)
    keep = reference.kept(line.astype(np.float64), params)
    weights = np.where(keep, np.exp(line.astype(np.float64) / params.temperature), 0.0)
    expected = weights / weights.sum() * num_draws
    counts = np.bincount(tokens, minlength=16)
    assert counts[~keep].sum() == 0
    chi_square = float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    assert chi_square < freedom + 5.5 * np.sqrt(2 * freedom) + 6


def test_the_draws_of_one_request_follow_the_distribution(kernels: str) -> None:
    """The same seed, at 4,000 successive positions."""
    bench = Bench(kernels, 1, 4)
    bench.add({0: Request({"seed": 7})})
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    counts, logits = np.zeros(4), torch.from_numpy(np.log(probs).astype(np.float32))[None]
    pairs = np.zeros((4, 4))
    previous = 0
    for _ in range(4_000):
        (token,) = bench.sample(logits, [0]).token_ids
        counts[token] += 1
        pairs[previous, token] += 1
        previous = token
    assert ((counts - probs * 4_000) ** 2 / (probs * 4_000)).sum() < 25
    expected = counts[:, None] * probs
    assert ((pairs - expected) ** 2 / expected).sum() < 45


def test_a_seeded_request_draws_the_same_in_any_batch_and_row(kernels: str) -> None:
    rng = np.random.default_rng(11)
    vocab, steps = 300, 12
    step_logits = torch.from_numpy((rng.standard_normal((steps, vocab)) * 2).astype(np.float32))
    mine = {"temperature": 0.9, "top_p": 0.95, "seed": 123, "frequency_penalty": 0.2}

    def run(num_rows: int, row: int, order: list[int], others: list[Request], preempt_at: int = -1) -> list[int]:
        bench = Bench(kernels, num_rows, vocab)
        bench.add({row: Request(mine, prompt=[1, 2])})
        bench.add({place: other.copy() for place, other in zip([r for r in range(num_rows) if r != row], others)})
        for step in range(steps):
            if step == preempt_at:
                bench.add({row: bench.remove(row)})
            logits = torch.randn(len(order), vocab, generator=torch.Generator().manual_seed(step)) * 3
            logits[order.index(row)] = step_logits[step]
            bench.sample(logits, order)
        return bench.requests[row].output

    alone = run(1, 0, [0], [])
    assert len(set(alone)) > 3
    assert run(1, 0, [0], [], preempt_at=5) == alone
    many = [random_request(rng, vocab) for _ in range(6)]
    assert run(7, 4, [4, 1, 6, 0], many) == alone
    assert run(7, 0, [6, 5, 4, 3, 2, 1, 0], many, preempt_at=3) == alone
    assert run(2, 1, [0, 1], [Request(GREEDY)]) == alone
    assert run(3, 1, [2, 0, 1], [Request({"top_k": 40}), Request({"top_k": 7, "min_p": 0.1})]) == alone


def test_unseeded_requests_use_the_default_seed(kernels: str) -> None:
    lines = torch.zeros(200, 1000)
    drawn = sample_once(kernels, lines, [Request({}, default_seed=seed) for seed in range(200)]).token_ids
    assert len(set(drawn)) > 150
    seeded = [Request({"seed": seed}, default_seed=9) for seed in range(200)]
    assert drawn == sample_once(kernels, lines, seeded).token_ids


def test_greedy_rows_beside_random_ones_take_the_lowest_id_of_equals(kernels: str) -> None:
    logits = torch.zeros(3, 2000)
    logits[0, [1500, 700]] = 2
    logits[2, 1999] = 1
    requests = [Request(GREEDY), Request({"top_k": 1, "seed": 1}), Request(GREEDY)]
    assert sample_once(kernels, logits, requests).token_ids[::2] == [700, 1999]


def test_ties_at_a_cut_are_all_kept(kernels: str) -> None:
    """8 tokens are as likely as the last one that top_k or top_p needs: each of them is drawn sometimes."""
    line = torch.full((3000,), -5.0)
    tied = [5, 50, 500, 600, 700, 800, 900, 2999]
    line[tied] = 4.0
    lines = line.expand(300, 3000).contiguous()
    for fields in ({"top_k": 2}, {"top_p": 0.2}):
        tokens = sample_once(kernels, lines, [Request({**fields, "seed": seed}) for seed in range(300)]).token_ids
        assert set(tokens) == set(tied)


def test_a_row_with_nan_fails_and_the_others_go_on(kernels: str) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 100)).astype(np.float32))
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"top_p": 0.9, "logprobs": 2},
        {"top_k": 5},
        {"min_p": 0.1, "top_k": 3},
    ] * 2
    good = sample_once(kernels, logits, [Request(dict(each)) for each in fields])
    broken = logits.clone()
    broken[0, 17] = torch.nan
    broken[1, :] = torch.nan
    broken[2, 99] = torch.inf
    broken[3, :50] = torch.nan
    result = sample_once(kernels, broken, [Request(dict(each)) for each in fields])
    assert sorted(result.errors) == [0, 1, 2, 3]
    assert all("logit" in message for message in result.errors.values())
    assert result.token_ids[:4] == [NO_TOKEN] * 4
    assert result.logprobs[:4] == [None] * 4
    assert result.token_ids[4:] == good.token_ids[4:]
    assert result.logprobs[4:] == good.logprobs[4:]


def test_a_row_without_any_token_left_fails(kernels: str) -> None:
    ban_all = [[token] for token in range(4)]
    requests = [Request(GREEDY, bad=ban_all), Request({}, bad=ban_all), Request({})]
    result = sample_once(kernels, torch.zeros(3, 4), requests)
    assert sorted(result.errors) == [0, 1]
    assert "no token is left" in result.errors[0]
    assert result.token_ids[2] != NO_TOKEN


def test_min_tokens_ends_when_reached(kernels: str) -> None:
    bench = Bench(kernels, 1, 10)
    bench.add({0: Request({**GREEDY, "min_tokens": 2, "stop_token_ids": [5]})})
    logits = torch.zeros(1, 10)
    logits[0, EOS[0]], logits[0, 5], logits[0, 7] = 3, 2, 1
    assert [bench.sample(logits, [0]).token_ids[0] for _ in range(3)] == [7, 7, EOS[0]]


def test_ignore_eos_leaves_eos_free_below_min_tokens(kernels: str) -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS[0]] = 1
    fields = {**GREEDY, "min_tokens": 2}
    assert sample_once(kernels, logits, [Request({**fields, "ignore_eos": True})]).token_ids == EOS
    assert sample_once(kernels, logits, [Request(fields)]).token_ids != EOS


def test_a_bad_word_of_several_tokens_is_cut_before_its_last(kernels: str) -> None:
    bench = Bench(kernels, 1, 10)
    bench.add({0: Request(GREEDY, prompt=[4, 5], bad=[[4, 5, 6], [9]])})
    chosen = []
    for wanted in (9, 6, 4, 5, 6, 5):  # what the model wants most, step by step; 9 is never allowed
        logits = torch.zeros(1, 10)
        logits[0, wanted], logits[0, 2] = 2, 1
        chosen += bench.sample(logits, [0]).token_ids
    assert chosen == [2, 6, 4, 5, 2, 5]  # the first 6 is free: [4, 5] stood in the prompt, not in the output


def test_penalties_count_tokens_as_they_come(kernels: str) -> None:
    rng = np.random.default_rng(4)
    fields = {**GREEDY, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}
    bench = Bench(kernels, 1, 6)
    bench.add({0: Request(fields, prompt=[0, 0, 2])})
    for _ in range(200):
        line = (rng.standard_normal(6) * 3).astype(np.float32)
        before = bench.requests[0].copy()
        (token,) = bench.sample(torch.from_numpy(line)[None], [0]).token_ids
        assert token in reference.expected_tokens(line.astype(np.float64), before, EOS)


def test_features_that_no_row_uses_are_not_touched(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("this should not be computed")

    monkeypatch.setattr(cpu_sampling.CpuSampling, "edit", forbidden)
    monkeypatch.setattr(cpu_sampling, "sample_tokens", forbidden)
    monkeypatch.setattr(cpu_sampling, "_sample_line", forbidden)
    monkeypatch.setattr("headway.runner.sampler.logprob_words", forbidden)
    assert sample_once(kernels, torch.eye(4, 9), [Request(GREEDY) for _ in range(4)]).token_ids == [0, 1, 2, 3]
