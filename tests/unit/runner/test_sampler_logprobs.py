"""Logprobs: values, ranks and most likely tokens against a brute-force reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.core import TokenLogprobs
from headway.runner import sampler as sampler_module
from headway.runner import token_logprobs as logprobs_module
from headway.runner.prompt_readings import prompt_logprobs
from headway.runner.sampler import NO_TOKEN
from tests.unit.runner.sampling_bench import ALL_KERNELS, Bench, random_logits, sample_once
from tests.unit.runner.sampling_reference import Request


def reference(line: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    wide = line.astype(np.float64)
    logprobs = wide - (np.log(np.exp(wide - wide.max()).sum()) + wide.max())
    order = sorted(range(len(line)), key=lambda i: (-line[i], i))[:num_top]
    return TokenLogprobs(
        token, float(logprobs[token]), int((line > line[token]).sum()) + 1, order, [float(logprobs[i]) for i in order]
    )


def assert_same(found: TokenLogprobs | None, expected: TokenLogprobs) -> None:
    assert found is not None
    assert (found.token_id, found.rank, found.top_ids) == (expected.token_id, expected.rank, expected.top_ids)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


def distinct_lines(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Values far enough apart that a log-softmax cannot make two of them equal."""
    return np.stack([rng.permutation(vocab) for _ in range(rows)]).astype(np.float32) / vocab * 12


def test_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "LINES_AT_A_TIME", 7)
    rng = np.random.default_rng(0)
    lines, tokens = distinct_lines(rng, 30, 200), rng.integers(0, 200, 30)
    for num_top in (0, 1, 5, 200):
        records = prompt_logprobs(torch.from_numpy(lines), tokens.tolist(), num_top)
        for record, line, token in zip(records, lines, tokens.tolist(), strict=True):
            assert_same(record, reference(line, token, num_top))
    assert prompt_logprobs(torch.zeros(0, 5), [], 3) == []
    with pytest.raises(ValueError, match="2 rows"):
        prompt_logprobs(torch.zeros(2, 5), [1], 3)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampled_logprobs_are_those_of_the_untouched_logits(
    kernels: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "LINES_AT_A_TIME", 2)
    logits = random_logits(np.random.default_rng(1), 8, 150).to(dtype)
    logits[3:5] = logits[3:5].round()  # ties at the cut
    logits[7, 0] = torch.nan
    lines = logits.float().numpy()
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "logprobs": 0, "seed": 1, "top_k": 20},
        {"temperature": 2.0, "seed": 3},
        {"temperature": 1.5, "logprobs": 5, "top_p": 0.9, "seed": 4, "repetition_penalty": 2.0},
        {"temperature": 0.0, "logprobs": 150, "logit_bias": {7: 100.0}},
        {"temperature": 0.0, "logprobs": 1, "min_tokens": 2, "stop_token_ids": [int(lines[5].argmax())]},
        {"temperature": 0.0, "logprobs": 4, "presence_penalty": 1.0},
        {"temperature": 0.0, "logprobs": 2},
    ]
    result = sample_once(kernels, logits, [Request(each, prompt=[1, 2, 3], output=[4]) for each in fields])
    for line, own, token, found in zip(lines, fields, result.token_ids, result.logprobs, strict=True):
        if "logprobs" in own and token != NO_TOKEN:
            assert_same(found, reference(line, token, own["logprobs"]))
        else:
            assert found is None
    assert result.token_ids[4] == 7 and result.token_ids[7] == NO_TOKEN
    assert result.logprobs[5] is not None and result.logprobs[5].rank == 2


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_logprobs_of_named_tokens(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of them per line, in the order given, in place of the most likely ones."""
    monkeypatch.setattr(sampler_module, "LINES_AT_A_TIME", 3)
    rng = np.random.default_rng(2)
    lines = distinct_lines(rng, 8, 150)
    named = [(5, 0, 149), (), (7,), None, (3, 4), None, (9,), tuple(range(100))]
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprob_token_ids": ids} | ({"logprobs": row % 3} if row < 5 else {})
        for row, ids in enumerate(named)
    ]
    result = sample_once(kernels, torch.from_numpy(lines.copy()), [Request(each, prompt=[1]) for each in fields])
    for row, ids in enumerate(named):
        record = result.logprobs[row]
        if row == 5:
            assert record is None, "it asked for nothing"
            continue
        assert_same(record, reference(lines[row], result.token_ids[row], 0 if ids else fields[row].get("logprobs", 0)))
        assert record is not None and tuple(record.named_ids) == (ids or ())
        expected = [reference(lines[row], token, 0).logprob for token in ids or ()]
        assert record.named_logprobs == pytest.approx(expected, abs=1e-5)


def test_a_row_forgets_the_tokens_that_an_earlier_request_named() -> None:
    bench = Bench("numpy", 2, 50)
    bench.add({0: Request({"logprob_token_ids": [3]}, prompt=[1])})
    bench.add({0: Request({"logprobs": 0}, prompt=[1])})
    record = bench.sample(random_logits(np.random.default_rng(0), 1, 50), [0]).logprobs[0]
    assert record is not None and not record.named_ids
