"""The sampler against a brute-force reference: every filter, edit and combination, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.errors import InvalidRequestError
from headway.runner import sampler as sampler_module
from headway.runner.sampler import NO_TOKEN, Sampler, uniforms
from headway.runner.sampling_batch import SamplingBatch
from headway.sampling_params import SamplingParams
from tests.unit.runner.sampling_reference import accepted_extremes

EOS = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(params=["as chosen", "on whole lines", "never compact"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways the draw can be computed must not differ in what they draw."""
    if request.param == "on whole lines":
        monkeypatch.setattr(sampler_module, "LINE_BY_LINE_DEVICES", frozenset())
    if request.param == "never compact":
        monkeypatch.setattr(sampler_module, "MAX_COMPACT_TOP_K", 0)
        monkeypatch.setattr(sampler_module, "ELEMENTS_AT_A_TIME", 1000)
    return str(request.param)


def sample(logits: np.ndarray, requests: list[dict[str, Any]], device: str = "cpu") -> sampler_module.SamplerOutput:
    """Sample one line per request; a request is SamplingParams fields plus `prompt`, `output` and `default_seed`."""
    batch = SamplingBatch(len(requests), logits.shape[1], eos_token_ids=[EOS])
    for row, request in enumerate(requests):
        add(batch, row, request)
    return Sampler().sample(torch.from_numpy(logits.copy()).to(device), range(len(requests)), batch)


def add(batch: SamplingBatch, row: int, request: dict[str, Any]) -> None:
    fields = dict(request)
    prompt, output = fields.pop("prompt", []), fields.pop("output", [])
    seed, bad = fields.pop("default_seed", 0), fields.pop("bad", None)
    params = SamplingParams(max_tokens=None, **fields)
    if bad is not None:
        params = params.with_bad_word_token_ids(bad)
    batch.add(row, params, prompt, output, seed)


def edited(logits: np.ndarray, request: dict[str, Any]) -> np.ndarray:
    """Reference for min_tokens, bad words, bias and penalties, one token at a time."""
    out = logits.astype(np.float64).copy()
    prompt, output = request.get("prompt", []), request.get("output", [])
    if len(output) < request.get("min_tokens", 0):
        stops = set(request.get("stop_token_ids", []))
        stops |= set() if request.get("ignore_eos") else {EOS}
        out[list(stops)] = -np.inf
    for word in request.get("bad") or []:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) and len(output) >= len(word) - 1:
            out[word[-1]] = -np.inf
    for token, bias in (request.get("logit_bias") or {}).items():
        out[token] += bias
    for token in range(len(out)):
        if token in prompt or token in output:
            penalty = request.get("repetition_penalty", 1.0)
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        count = list(output).count(token)
        if count:
            out[token] -= request.get("frequency_penalty", 0.0) * count + request.get("presence_penalty", 0.0)
    return out


def filtered(logits: np.ndarray, request: dict[str, Any]) -> np.ndarray:
    """Reference probabilities after temperature, min_p, top_k and top_p, by sorting everything in float64."""
    scaled = logits / request.get("temperature", 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs = np.where(probs >= request.get("min_p", 0.0) * probs.max(), probs, 0.0)
    top_k = request.get("top_k", 0)
    if 0 < top_k < len(probs):
        probs = np.where(logits >= np.sort(logits)[-top_k], probs, 0.0)
    top_p = request.get("top_p", 1.0)
    if top_p < 1.0:
        probs /= probs.sum()
        ordered = np.sort(probs)[::-1]
        last = int(np.searchsorted(np.cumsum(ordered), top_p))
        probs = np.where(probs >= ordered[last], probs, 0.0)
    return probs / probs.sum()


def expected_tokens(logits: np.ndarray, request: dict[str, Any]) -> set[int]:
    """The token the reference draws; both neighbours where the uniform number falls on the border between them."""
    changed = edited(logits, request)
    if request.get("temperature", 1.0) < 1e-5:
        return {int(np.argmax(changed))}
    seed = request["seed"] if request.get("seed") is not None else request.get("default_seed", 0)
    counters = np.array([len(request.get("output", []))])
    uniform = float(uniforms(np.array([seed % 2**64], dtype=np.uint64), counters)[0])
    cumulative = np.cumsum(filtered(changed, request))
    return {int(np.searchsorted(cumulative, uniform + shift, side="right")) for shift in (-1e-6, 0.0, 1e-6)}


def random_request(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    request: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.8])),
        "prompt": rng.integers(0, vocab, rng.integers(1, 12)).tolist(),
        "output": rng.integers(0, vocab, rng.integers(0, 9)).tolist(),
        "seed": None if rng.random() < 0.3 else int(rng.integers(-(2**62), 2**62)),
        "default_seed": int(rng.integers(0, 2**62)),
    }
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
        "bad": [rng.integers(0, vocab, rng.integers(1, 4)).tolist() for _ in range(3)]
        + [[*request["output"][-1:], int(rng.integers(0, vocab))]],
    }
    for name in rng.choice(list(options), rng.integers(0, 6), replace=False):
        request[str(name)] = options[name]
    return request


@pytest.mark.parametrize("vocab", [5, 64, 1000])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_random_requests_draw_what_brute_force_draws(vocab: int, scale: float, path: str, device: str) -> None:
    rng = np.random.default_rng([vocab, int(scale)])
    requests = [random_request(rng, vocab) for _ in range(150)]
    logits = (rng.standard_normal((len(requests), vocab)) * scale).astype(np.float32)
    result = sample(logits, requests, device)
    impossible = {
        place for place, (line, request) in enumerate(zip(logits, requests)) if edited(line, request).max() == -np.inf
    }
    assert set(result.errors) == impossible
    for place in set(range(len(requests))) - impossible:
        assert result.token_ids[place] in expected_tokens(logits[place], requests[place]), requests[place]


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 2.0}, {"top_k": 9, "top_p": 0.7, "min_p": 0.01}],
    ids=str,
)
def test_draws_follow_the_distribution(fields: dict[str, Any], path: str, device: str) -> None:
    """Chi-square of 6,000 draws with distinct seeds: below the 99.99% quantile."""
    logits = np.linspace(-2, 3, 16, dtype=np.float32)[np.random.default_rng(5).permutation(16)]
    num_draws = 6_000
    lines = np.broadcast_to(logits, (num_draws, 16)).copy()
    tokens = sample(lines, [{**fields, "seed": seed} for seed in range(num_draws)], device).token_ids
    expected = filtered(logits.astype(np.float64), fields) * num_draws
    counts = np.bincount(tokens, minlength=16)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5.5 * np.sqrt(2 * freedom) + 6


def test_the_draws_of_one_request_follow_the_distribution() -> None:
    """The same seed, at 4,000 successive output positions."""
    batch = SamplingBatch(1, 4)
    batch.add(0, SamplingParams(seed=7, max_tokens=None), [], [], 0)
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    counts, logits = np.zeros(4), torch.from_numpy(np.log(probs).astype(np.float32))[None]
    pairs = np.zeros((4, 4))
    previous = 0
    for _ in range(4_000):
        token = Sampler().sample(logits.clone(), [0], batch).token_ids[0]
        batch.append_token(0, token)
        counts[token] += 1
        pairs[previous, token] += 1
        previous = token
    assert ((counts - probs * 4_000) ** 2 / (probs * 4_000)).sum() < 25
    expected = counts[:, None] * probs
    assert ((pairs - expected) ** 2 / expected).sum() < 45


def test_a_seeded_request_draws_the_same_in_any_batch_and_row(path: str) -> None:
    rng = np.random.default_rng(11)
    vocab, steps = 300, 12
    step_logits = (rng.standard_normal((steps, vocab)) * 2).astype(np.float32)
    mine = {"temperature": 0.9, "top_p": 0.95, "seed": 123, "frequency_penalty": 0.2, "prompt": [1, 2]}

    def run(rows: int, row: int, order: list[int], others: list[dict[str, Any]], preempt_at: int = -1) -> list[int]:
        batch = SamplingBatch(rows, vocab, eos_token_ids=[EOS])
        add(batch, row, mine)
        for other_row, other in zip([r for r in range(rows) if r != row], others, strict=True):
            add(batch, other_row, other)
        tokens: list[int] = []
        for step in range(steps):
            if step == preempt_at:
                batch.remove(row)
                add(batch, row, {**mine, "output": tokens})
            logits = (np.random.default_rng(step).standard_normal((len(order), vocab)) * 3).astype(np.float32)
            logits[order.index(row)] = step_logits[step]
            chosen = Sampler().sample(torch.from_numpy(logits), order, batch).token_ids
            for other_row, token in zip(order, chosen, strict=True):
                batch.append_token(other_row, token)
            tokens.append(chosen[order.index(row)])
        return tokens

    alone = run(1, 0, [0], [])
    assert len(set(alone)) > 3
    assert run(1, 0, [0], [], preempt_at=5) == alone
    many = [random_request(rng, vocab) for _ in range(6)]
    assert run(7, 4, [4, 1, 6, 0], many) == alone
    assert run(7, 0, [6, 5, 4, 3, 2, 1, 0], many, preempt_at=3) == alone
    assert run(2, 1, [0, 1], [{"temperature": 0.0}]) == alone
    assert run(3, 1, [2, 0, 1], [{"top_k": 40}, {"top_k": 7, "min_p": 0.1}]) == alone


def test_rows_are_checked() -> None:
    batch = SamplingBatch(2, 8)
    batch.add(0, SamplingParams(), [], [], 0)
    with pytest.raises(ValueError, match="taken"):
        batch.add(0, SamplingParams(), [], [], 0)
    with pytest.raises(ValueError, match="no request"):
        batch.remove(1)
    with pytest.raises(ValueError, match="shape"):
        Sampler().sample(torch.zeros(2, 8), [0], batch)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        batch.add(1, SamplingParams(bad_words=["x"]), [], [], 0)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        batch.add(1, SamplingParams(logit_bias={8: 1}), [], [], 0)
    assert Sampler().sample(torch.zeros(0, 8), [], batch).token_ids == []


def test_unseeded_requests_use_the_default_seed() -> None:
    line = np.zeros((200, 1000), dtype=np.float32)
    drawn = sample(line, [{"default_seed": seed} for seed in range(200)]).token_ids
    assert len(set(drawn)) > 150
    assert drawn == sample(line, [{"seed": seed, "default_seed": 9} for seed in range(200)]).token_ids


def test_greedy_takes_the_lowest_id_of_equals(device: str) -> None:
    logits = np.zeros((3, 2000), dtype=np.float32)
    logits[0, [1500, 700]] = 2
    logits[2, 1999] = 1
    greedy = {"temperature": 0.0}
    assert sample(logits, [greedy] * 3, device).token_ids == [700, 0, 1999]
    assert sample(logits, [greedy, {"top_k": 1, "seed": 1}, greedy], device).token_ids[::2] == [700, 1999]


def test_ties_at_a_cut_are_all_kept(path: str, device: str) -> None:
    """8 tokens are as likely as the last one that top_k or top_p needs: each of them is drawn sometimes."""
    line = np.full(3000, -5.0, dtype=np.float32)
    line[[5, 50, 500, 600, 700, 800, 900, 2999]] = 4.0
    lines = np.broadcast_to(line, (300, 3000)).copy()
    for fields in ({"top_k": 2}, {"top_p": 0.2}):
        tokens = sample(lines, [{**fields, "seed": seed} for seed in range(300)], device).token_ids
        assert set(tokens) == {5, 50, 500, 600, 700, 800, 900, 2999}


def test_a_row_with_nan_fails_and_the_others_go_on(path: str, device: str) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, 100)).astype(np.float32)
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"top_p": 0.9, "logprobs": 2},
        {"top_k": 5},
        {"min_p": 0.1, "top_k": 3},
    ] * 2
    good = sample(logits, requests, device)
    broken = logits.copy()
    broken[0, 17] = np.nan
    broken[1, :] = np.nan
    broken[2, 99] = np.inf
    broken[3, :50] = np.nan
    result = sample(broken, requests, device)
    assert sorted(result.errors) == [0, 1, 2, 3]
    assert all("logit" in message for message in result.errors.values())
    assert result.token_ids[:4] == [NO_TOKEN] * 4
    assert result.logprobs[:4] == [None] * 4
    assert result.token_ids[4:] == good.token_ids[4:]
    assert result.logprobs[4:] == good.logprobs[4:]


def test_a_row_without_any_token_left_fails(device: str) -> None:
    ban_all = {"bad": [[token] for token in range(4)]}
    result = sample(np.zeros((3, 4), np.float32), [{**ban_all, "temperature": 0.0}, ban_all, {}], device)
    assert sorted(result.errors) == [0, 1]
    assert "no token is left" in result.errors[0]
    assert result.token_ids[2] != NO_TOKEN


def test_min_tokens_ends_when_reached() -> None:
    batch = SamplingBatch(1, 10, eos_token_ids=[EOS])
    batch.add(0, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5], max_tokens=9), [1], [], 0)
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 5], logits[0, 7] = 3, 2, 1
    chosen = []
    for _ in range(3):
        chosen.append(Sampler().sample(logits.clone(), [0], batch).token_ids[0])
        batch.append_token(0, chosen[-1])
    assert chosen == [7, 7, EOS]


def test_ignore_eos_leaves_eos_free_below_min_tokens() -> None:
    logits = np.zeros((1, 10), np.float32)
    logits[0, EOS] = 1
    request = {"temperature": 0.0, "min_tokens": 2}
    assert sample(logits, [{**request, "ignore_eos": True}]).token_ids == [EOS]
    assert sample(logits, [request]).token_ids != [EOS]


def test_a_bad_word_of_several_tokens_is_cut_before_its_last() -> None:
    batch = SamplingBatch(1, 10)
    params = SamplingParams(temperature=0, bad_words=["w"], max_tokens=9).with_bad_word_token_ids([[4, 5, 6], [9]])
    batch.add(0, params, [4, 5], [], 0)
    order = [9, 6, 4, 5, 6, 5]  # what the model wants most, step by step; 9 is never allowed
    chosen = []
    for wanted in order:
        logits = torch.zeros(1, 10)
        logits[0, wanted], logits[0, 2] = 2, 1
        chosen.append(Sampler().sample(logits, [0], batch).token_ids[0])
        batch.append_token(0, chosen[-1])
    assert chosen == [2, 6, 4, 5, 2, 5]  # the first 6 is free: [4, 5] stood in the prompt, not in the output


def test_penalties_count_tokens_as_they_come() -> None:
    rng = np.random.default_rng(4)
    request = {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}
    batch = SamplingBatch(1, 6)
    add(batch, 0, {**request, "prompt": [0, 0, 2]})
    output: list[int] = []
    for _ in range(200):
        line = (rng.standard_normal(6) * 3).astype(np.float32)
        token = Sampler().sample(torch.from_numpy(line.copy())[None], [0], batch).token_ids[0]
        assert token in expected_tokens(line, {**request, "prompt": [0, 0, 2], "output": output})
        output.append(token)
        batch.append_token(0, token)


def test_features_that_no_row_uses_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("this should not be computed")

    for name in ("_edit_logits", "_choose_mixed", "_RawLogprobs"):
        monkeypatch.setattr(sampler_module, name, forbidden)
    logits = np.eye(4, 9, dtype=np.float32)
    assert sample(logits, [{"temperature": 0.0}] * 4).token_ids == [0, 1, 2, 3]


def test_uniforms_are_uniform_and_unrelated() -> None:
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    counters = np.tile(np.arange(300), 300)
    values = uniforms(seeds, counters)
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == len(values)
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 99 + 5.5 * np.sqrt(198)
    table = values.reshape(300, 300)
    for shifted in (table[1:, :], table[:, 1:], table[1:, 1:]):
        here = table[: shifted.shape[0], : shifted.shape[1]]
        assert abs(np.corrcoef(here.ravel(), shifted.ravel())[0, 1]) < 0.015


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_every_value_that_is_accepted_gives_a_token(path: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    cases = accepted_extremes()
    logits = (rng.normal(0.0, 1.0, (len(cases), 50)) * scale).astype(np.float32)
    requests = [{"seed": 3, "prompt": [1, 2, 5], "output": [5, 5, 7], **case} for case in cases]
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        output = sample(logits, requests)
    assert output.errors == {}
    assert all(0 <= token < 50 for token in output.token_ids)
