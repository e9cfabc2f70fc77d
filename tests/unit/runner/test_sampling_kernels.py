"""Every implementation of sampling against brute force, token by token, and against each other.

Without a GPU, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.triton_device import DEVICE, ON_GPU  # isort: split

import triton
import triton.language as tl

from headway.errors import InvalidRequestError
from headway.runner import cpu_sampling, triton_sampling
from headway.runner.sampler import NO_TOKEN, RowRecord, SamplerOutput
from headway.runner.triton_filters import find_thresholds
from headway.runner.triton_sampling import RECORD_WORDS, gumbel_noise, noise_bits, noise_key
from headway.sampling_params import SamplingParams
from tests.unit.runner import sampling_reference as reference
from tests.unit.runner.sampling_bench import (
    ALL_KERNELS,
    EOS,
    EVERY_BUILD,
    MAX_MODEL_LEN,
    ON_CPU,
    Bench,
    random_logits,
    random_request,
    sample_once,
)
from tests.unit.runner.sampling_reference import Request


@pytest.fixture(params=EVERY_BUILD)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(logits: torch.Tensor, requests: list[Request], output: SamplerOutput) -> None:
    """Every token is the reference's; the requests are as they were before the step."""
    assert output.errors == {}
    for line, request in enumerate(requests):
        expected = reference.expected_tokens(logits[line].double().numpy(), request, EOS)
        assert output.token_ids[line] in expected, (line, request)


# ------------------------------------------------------------------------------------------ against brute force, by row

FEATURES: dict[str, Callable[[np.random.Generator, int], dict[str, Any]]] = {
    "temperature": lambda rng, vocab: {"temperature": float(rng.choice([0.0, 0.4, 1.7]))},
    "top_k": lambda rng, vocab: {"top_k": int(rng.choice([-1, 1, 3, 10, vocab // 2, vocab, 5 * vocab]))},
    "top_p": lambda rng, vocab: {"top_p": float(rng.choice([1e-6, 0.3, 0.9, 0.999]))},
    "min_p": lambda rng, vocab: {"min_p": float(rng.choice([0.001, 0.02, 0.3, 1.0]))},
    "penalties": lambda rng, vocab: {
        "repetition_penalty": float(rng.choice([0.6, 1.0, 1.3, 5.0])),
        "frequency_penalty": float(rng.choice([-1.5, 0.0, 0.7, 2.0])),
        "presence_penalty": float(rng.choice([-2.0, 0.0, 0.4, 2.0])),
    },
    "bias": lambda rng, vocab: {
        "logit_bias": {
            int(t): float(b) for t, b in zip(rng.integers(0, vocab, 4), rng.choice([-100, -9, 3, 9, 100], 4))
        }
    },
    "bad words": lambda rng, vocab: {},
    "min_tokens": lambda rng, vocab: {
        "min_tokens": int(rng.integers(1, 9)),
        "stop_token_ids": rng.integers(0, vocab, 3).tolist(),
        "ignore_eos": bool(rng.random() < 0.5),
    },
}


def request_with(features: Sequence[str], rng: np.random.Generator, vocab_size: int) -> Request:
    request = random_request(rng, vocab_size)
    for name in features:
        request.fields |= FEATURES[name](rng, vocab_size)
    if "bad words" in features:
        request.bad = [rng.integers(0, vocab_size, rng.integers(1, 4)).tolist() for _ in range(4)]
        request.bad += [[*request.output[-n:], int(rng.integers(0, vocab_size))] for n in (1, 2, 3)]
        request.bad += [[*request.prompt[-1:], *request.output, int(rng.integers(0, vocab_size))]]
    if rng.random() < 0.4:  # none, which means the default, or zero, which does not
        request.fields["seed"] = 0 if rng.random() < 0.5 else None
        request.default_seed = int(rng.integers(0, 2**62))
    return request


def some_features(rng: np.random.Generator, vocab_size: int, number: int) -> Request:
    return request_with(rng.choice(list(FEATURES), number, replace=False).tolist(), rng, vocab_size)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.4},
    {"min_p": 0.2},
    {"temperature": 1.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Step = tuple[torch.Tensor, list[Request]]


def filters(rng: np.random.Generator, vocab_size: int, dtype: torch.dtype) -> Step:
    """In half precision some tokens are as likely as others."""
    requests = [random_request(rng, vocab_size, **fields) for fields in FILTERS]
    return random_logits(rng, len(requests), vocab_size).to(dtype), requests


def large_vocabulary(rng: np.random.Generator) -> Step:
    choices = [{}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"top_p": 0.999}]
    requests = [random_request(rng, 49152, **fields) for fields in choices]
    return random_logits(rng, 3, 49152, scale=4.0).bfloat16(), requests


def flat(rng: np.random.Generator) -> Step:
    """Most tokens are as likely as the best: any of them may win."""
    choices = itertools.product((0.01, 0.3, 2.0), [{}, {"top_k": 6000}, {"min_p": 0.05}])
    spreads, fields = zip(*choices)
    requests = [random_request(rng, 9000, temperature=0.8, **own) for own in fields]
    return random_logits(rng, len(requests), 9000, scale=1.0) * torch.tensor(spreads)[:, None], requests


def ties_at_a_cut(rng: np.random.Generator) -> Step:
    """8 tokens are as likely as the last one that top_k or top_p needs: any of them may win."""
    logits = torch.full((16, 3000), -5.0)
    logits[:, [5, 50, 500, 600, 700, 800, 900, 2999]] = 4.0
    return logits, [random_request(rng, 3000, **({"top_k": 2} if row % 2 else {"top_p": 0.2})) for row in range(16)]


def every_combination(rng: np.random.Generator) -> Step:
    """In the interpreter of a third, in which every two are together and apart all the same."""
    on_off = itertools.product([False, True], repeat=len(FEATURES))
    chosen = list(on_off)[:: 1 if ON_GPU else 3]
    requests = [request_with([*itertools.compress(FEATURES, each)], rng, 23) for each in chosen]
    return random_logits(rng, len(requests), 23), requests


def some_combinations(rng: np.random.Generator) -> Step:
    return random_logits(rng, 24, 1500), [some_features(rng, 1500, 5) for _ in range(24)]


STEPS: dict[str, Callable[[np.random.Generator], Step]] = {
    **{
        f"filters-{vocab_size}-{dtype}": functools.partial(filters, vocab_size=vocab_size, dtype=dtype)
        for vocab_size, dtype in zip((1, 2, 17, 63, 64, 65, 1000, 2049, 5003), itertools.cycle(DTYPES))
    },
    **{step.__name__: step for step in (large_vocabulary, flat, ties_at_a_cut, every_combination, some_combinations)},
}


@pytest.mark.parametrize("step", STEPS)
def test_each_row_draws_what_brute_force_draws(kernels: str, step: str) -> None:
    logits, requests = STEPS[step](np.random.default_rng(list(STEPS).index(step)))
    before = [request.copy() for request in requests]
    check(logits, before, sample_once(kernels, logits, requests))


# ---------------------------------------------------------------------------------------------------------------- noise


@triton.jit
def _noise_kernel(out, table, num_ids, TILE: tl.constexpr):
    seed = tl.load(table).to(tl.uint64, bitcast=True)
    position = tl.load(table + 1).to(tl.uint64, bitcast=True)
    key_low, key_high = noise_key(seed, position)
    ids = tl.arange(0, TILE)
    tl.store(out + ids, gumbel_noise(noise_bits(key_low, key_high, ids)), mask=ids < num_ids)


@triton.jit
def _noise_of_bits_kernel(out, bits, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    tl.store(out + lanes, gumbel_noise(tl.load(bits + lanes).to(tl.uint32)))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31])
def test_the_noise_is_the_documented_hash(seed: int, position: int) -> None:
    expected = reference.noise(seed, position, 1000)
    assert cpu_sampling.noise_key(seed, position) == reference.noise_key(seed, position)
    bits = cpu_sampling.noise_bits(cpu_sampling.noise_key(seed, position), np.arange(1000))
    np.testing.assert_allclose(cpu_sampling.gumbel_noise(bits), expected, rtol=2e-6, atol=3e-6)
    out = torch.empty(1024, device=DEVICE)
    table = torch.from_numpy(np.asarray([seed, position], dtype=np.uint64).view(np.int64)).to(DEVICE)
    _noise_kernel[(1,)](out, table, 1000, TILE=1024)
    np.testing.assert_allclose(out.cpu().numpy()[:1000], expected, rtol=0, atol=3e-5)


def test_the_noise_is_finite_and_exact_at_both_ends() -> None:
    bits = [0, 1, 2, 1000, 2**24 - 1, 2**24, 2**24 + 1, 2**31, 2**32 - 2**20, 2**32 - 3, 2**32 - 2, 2**32 - 1]
    bits += [0] * (16 - len(bits))
    out = torch.empty(16, device=DEVICE)
    _noise_of_bits_kernel[(1,)](out, torch.tensor(bits, dtype=torch.int64, device=DEVICE), TILE=16)
    u = (np.asarray(bits, dtype=np.float64) + 0.5) / 2.0**32
    np.testing.assert_allclose(out.cpu().numpy(), -np.log(-np.log1p(-u)), rtol=1e-6, atol=1e-5)


# --------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize(("vocab_size", "dtype"), [*zip((2, 17, 1000, 5000, 9000), itertools.cycle(DTYPES))])
def test_greedy_takes_the_lowest_id_of_the_largest(kernels: str, vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, 5, vocab_size, scale=1.5).round().to(dtype)  # whole numbers: ties everywhere
    logits[1] = -5.0
    logits[2, -1] = 100.0
    logits[3, [-1, vocab_size // 2, vocab_size // 4]] = 7.0  # a tie far apart
    output = sample_once(kernels, logits, [Request({"temperature": 0.0}) for _ in range(5)])
    assert output.token_ids == [int(line.float().numpy().argmax()) for line in logits]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_k": 3, "top_p": 0.5, "min_p": 0.1}]
)
def test_rows_without_a_choice_fail_alone(kernels: str, fields: dict[str, Any]) -> None:
    vocab_size = 3000
    logits = random_logits(np.random.default_rng(0), 9, vocab_size)
    logits[1, 2900] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    logits[6] = torch.nan
    logits[7, :1500] = torch.nan
    logits[8, 1:] = -torch.inf
    bench = Bench(kernels, 9, vocab_size)
    bench.add({row: Request(dict(fields), bad=[[0]] if row == 8 else None) for row in range(9)})
    output = bench.sample(logits, range(9))
    assert [row for row, token in enumerate(output.token_ids) if token == NO_TOKEN] == [1, 2, 3, 6, 7, 8]
    nothing_left = "no token is left to choose from: bans and masks rule out the whole vocabulary"
    assert output.errors == {
        **dict.fromkeys((1, 6, 7), "the model gave a logit of nan"),
        2: "the model gave a logit of inf",
        **dict.fromkeys((3, 8), nothing_left),
    }
    assert output.token_ids[4] == 0
    # The next step of a failed row has a token to work with.
    assert bench.token_rows[1:4, 1].tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------------------- edits


def test_bans_act_where_the_banned_token_would_win(kernels: str) -> None:
    """The random tests above seldom draw a banned token; here each would be drawn if it were not banned."""
    eos = EOS[0]
    cases: list[tuple[Request, int, bool]] = [
        (Request({}, bad=[[5]]), 5, True),
        (Request({}, prompt=[8], output=[1, 2], bad=[[2, 5]]), 5, True),
        (Request({}, prompt=[8], output=[1, 2], bad=[[1, 2, 5]]), 5, True),
        (Request({}, prompt=[8], output=[1, 2], bad=[[8, 1, 2, 5]]), 5, False),  # the prompt does not count
        (Request({}, prompt=[8], output=[1, 2], bad=[[1, 5], [2, 6]]), 5, False),
        (Request({"min_tokens": 3, "stop_token_ids": [5]}, output=[1, 2]), 5, True),
        (Request({"min_tokens": 2, "stop_token_ids": [5]}, output=[1, 2]), 5, False),
        (Request({"min_tokens": 3}, output=[1, 2]), eos, True),
        (Request({"min_tokens": 2}, output=[1, 2]), eos, False),
        (Request({"min_tokens": 3, "ignore_eos": True}, output=[1, 2]), eos, False),
        (Request({"logit_bias": {5: -100.0}}), 5, True),
        (Request({"logit_bias": {5: 100.0}}, bad=[[5]]), 5, True),
    ]
    logits = torch.zeros(len(cases), 40)
    for line, (_, favourite, _) in enumerate(cases):
        logits[line, favourite] = 60.0
    output = sample_once(kernels, logits, [request for request, _, _ in cases])
    found = [token != favourite for token, (_, favourite, _) in zip(output.token_ids, cases, strict=True)]
    assert found == [banned for _, _, banned in cases]


# ------------------------------------------------------------------------------------------------------- one definition


def test_all_choose_the_same() -> None:
    """Rows with any features, over several steps in which all of them go on from the same tokens."""
    rng = np.random.default_rng(2026)
    vocab_size, num_rows = 1200, 96 if ON_GPU else 24
    requests = [some_features(rng, vocab_size, int(rng.integers(0, len(FEATURES)))) for _ in range(num_rows)]
    for request in requests[::3]:
        request.fields["temperature"] = 0.8
    benches = [Bench(name, num_rows, vocab_size) for name in ALL_KERNELS]
    for bench in benches:
        bench.add({row: request.copy() for row, request in enumerate(requests)})
    for _ in range(3):
        logits = random_logits(rng, num_rows, vocab_size, scale=2.0)
        first, *others = (bench.sample(logits, range(num_rows)) for bench in benches)
        assert first.errors == {}
        assert all(other == first for other in others)


# --------------------------------------------------------------------------------------------------------- thresholds


def table_of(params: list[SamplingParams]) -> torch.Tensor:
    records = np.zeros(len(params), dtype=RowRecord)
    for record, p in zip(records, params):
        record["inverse_temperature"], record["top_k"], record["top_p"] = 1 / p.temperature, p.top_k, p.top_p
        record["min_p_offset"] = p.temperature * np.log(p.min_p) if p.min_p else -np.inf
    return torch.from_numpy(records.view(np.int32).reshape(len(params), RECORD_WORDS)).to(DEVICE)


def hard_lines(vocab_size: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(vocab_size)
    normal = rng.normal(0, 3, vocab_size)
    yield np.round(normal)  # ties at every cut
    yield np.full(vocab_size, -2.5)
    yield np.where(np.arange(vocab_size) % 2, 0.0, -0.0)
    yield np.where(normal > 0, -np.inf, normal)  # fewer numbers than top_k asks for
    yield normal * 1e-30
    yield -np.abs(normal) * 1e4
    yield np.where(np.arange(vocab_size) == vocab_size // 2, 1e30, normal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds_keep_what_sorting_keeps(dtype: torch.dtype) -> None:
    vocab_size = 256
    params = [
        SamplingParams(top_k=k, top_p=p, min_p=m)
        for k, p, m in [(1, 1.0, 0.0), (64, 1.0, 0.0), (65, 1.0, 0.0), (0, 0.5, 0.0), (200, 0.97, 0.0), (3, 1.0, 1.0)]
    ]
    lines = [torch.from_numpy(line).float().to(dtype) for line in hard_lines(vocab_size)]
    lines = [line for line in lines if float(line.max()) < torch.inf]
    logits = torch.stack([line for line in lines for _ in params])
    row_ids = torch.arange(len(params), dtype=torch.int32, device=DEVICE).repeat(len(lines))
    found = find_thresholds(logits.to(DEVICE), row_ids=row_ids, table=table_of(params)).cpu()
    for line, threshold, p in zip(logits.double(), found.double(), itertools.cycle(params)):
        np.testing.assert_array_equal((line >= threshold).numpy(), reference.kept(line.numpy(), p), err_msg=str(p))


# --------------------------------------------------------------------------------------------------------- frequencies


def assert_frequencies(tokens: Sequence[int], line: np.ndarray, params: SamplingParams) -> None:
    """Chi-square; fails by chance about once in thirty thousand, and seeds are fixed."""
    keep = reference.kept(line, params)
    weights = np.where(keep, np.exp(line / params.temperature), 0.0)
    observed = np.bincount(tokens, minlength=len(line))
    expected = weights / weights.sum() * len(tokens)
    assert observed[~keep].sum() == 0
    chi_square = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    degrees = keep.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize(("varied", "fields"), [("seed", {"temperature": 0.5, "top_k": 8}), ("position", {})])
def test_frequencies_of_the_reference_are_the_probabilities(varied: str, fields: dict[str, Any]) -> None:
    """Every implementation draws what the reference draws."""
    line = np.random.default_rng(17).normal(0, 1.2, 17)
    params = SamplingParams(**fields)
    masked = np.where(reference.kept(line, params), line / params.temperature, -np.inf)
    noises = (reference.noise(*((n, 9) if varied == "seed" else (9, n)), 17) for n in range(4_000))
    assert_frequencies([int((masked + noise).argmax()) for noise in noises], line, params)


# -------------------------------------------------------------------------------------------------- nothing else counts


def test_a_row_draws_the_same_in_any_batch(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 2500
    rng = np.random.default_rng(8)
    ours = [
        Request({"seed": 11}),
        Request({"seed": 11, "top_k": 30, "top_p": 0.9, "min_p": 0.001}),
        Request({"seed": 11, "temperature": 0.0}),
    ]
    line = random_logits(rng, 1, vocab_size).bfloat16()[0]

    def tokens(places: list[int], num_rows: int, others: list[dict[str, Any]]) -> list[int]:
        bench = Bench(kernels, num_rows, vocab_size)
        requests = {row: Request(dict(others[row % len(others)])) for row in range(num_rows)}
        requests |= {row: Request(dict(r.fields)) for row, r in zip(places, ours)}
        bench.add(requests)
        logits = random_logits(rng, num_rows + 2, vocab_size).bfloat16()
        logits[num_rows:] = torch.nan  # padding
        order = rng.permutation(num_rows).tolist()
        for row in places:
            logits[order.index(row)] = line
        output = bench.sample(logits, order)
        return [output.token_ids[order.index(row)] for row in places]

    plain: list[dict[str, Any]] = [{"seed": 4}, {"temperature": 0.0}]
    edited: list[dict[str, Any]] = [{"logit_bias": {7: 3.0}}, {"presence_penalty": 1.0, "logprobs": 2}]
    alone = tokens([0, 1, 2], 3, plain)
    for num_programs in (1, 7, 10_000):
        monkeypatch.setattr(triton_sampling, "PICK_PROGRAMS", num_programs)
        assert tokens([2, 0, 1], 3, plain) == alone
        assert tokens([6, 1, 4], 7, edited) == alone


def test_steps_with_everything_that_can_happen(kernels: str) -> None:
    """Random requests come, go, are preempted and come back, over steps in which some rows do not take part."""
    vocab_size, num_rows = 31, 6
    rng = np.random.default_rng(99)
    bench = Bench(kernels, num_rows, vocab_size)
    preempted: list[Request] = []
    for _ in range(25):
        for row in [row for row in bench.requests if rng.random() < 0.15]:
            request = bench.remove(row)
            if rng.random() < 0.6:
                preempted.append(request)
        free = [row for row in range(num_rows) if row not in bench.requests and rng.random() < 0.7]
        entering: dict[int, Request] = {}
        for row in rng.permutation(free).tolist():
            back = preempted and rng.random() < 0.5
            entering[row] = preempted.pop() if back else some_features(rng, vocab_size, int(rng.integers(0, 5)))
        bench.add(entering)
        rows = [row for row in rng.permutation(sorted(bench.requests)).tolist() if rng.random() < 0.8]
        logits = random_logits(rng, len(rows) + 1, vocab_size, scale=1.0)
        before = [bench.requests[row].copy() for row in rows]
        check(logits, before, bench.sample(logits, rows))
        for row, request in bench.requests.items():
            if request.position > MAX_MODEL_LEN - 2:
                continue
            tokens = [*request.prompt, *request.output]
            assert bench.token_rows[row, : len(tokens) + 1].tolist() == [*tokens, -7]


def test_tokens_are_written_at_their_position_and_never_past_the_end(kernels: str) -> None:
    bench = Bench(kernels, 4, 10)
    bench.add({row: Request({"temperature": 0.0}) for row in (1, 2, 3)})
    logits = torch.zeros(3, 10)
    logits[[0, 1, 2], [4, 5, 6]] = 1.0
    before = bench.token_rows.clone()
    output = bench.sample(logits, [3, 1, 2], positions=[MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
    assert output.token_ids == [4, 5, 6]
    changed = (bench.token_rows != before).nonzero().tolist()
    assert changed == [[3, MAX_MODEL_LEN - 1]] and int(bench.token_rows[3, -1]) == 4


# ---------------------------------------------------------------------------------------------------------- the edges


class NothingIsAsked(TorchDispatchMode):
    """Fails on the operations that make the host wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"}, name
        if name in {"index", "index_put_"}:
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


def test_the_host_never_waits() -> None:
    rng = np.random.default_rng(7)
    vocab_size = 50
    requests = [request_with(list(FEATURES), rng, vocab_size) for _ in range(3)]
    requests[0].fields["logprobs"] = 3
    bench = Bench("triton", 4, vocab_size)
    rows, positions = np.arange(3), np.asarray([request.position for request in requests])
    bench.stage(range(3), positions.tolist())
    logits = random_logits(rng, 3, vocab_size).to(DEVICE)
    before = logits.clone()
    seats = bench.seats(dict(enumerate(requests)))
    for is_warm in (False, True):
        if is_warm and DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            with NothingIsAsked():
                for seat in seats:
                    bench.rows.seat(seat)
                bench.sampler.seat(seats)
                pending = bench.sampler.sample(logits, rows, positions)
                for row in range(3):
                    bench.rows.clear(row)
        finally:
            if DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
        assert len(pending.result().token_ids) == 3
        assert torch.equal(logits, before), "edits are made elsewhere"


def test_misuse_is_refused(kernels: str) -> None:
    bench = Bench(kernels, 2, 9)
    assert bench.sample(torch.zeros(4, 9), []) == SamplerOutput([], []), "a step without rows"
    bench.add({0: Request({})})
    with pytest.raises(ValueError, match="logits of shape"):
        bench.sample(torch.zeros(1, 8), [0])
    with pytest.raises(ValueError, match="logits of shape"):
        bench.sample(torch.zeros(0, 9), [0])
    with pytest.raises(ValueError, match="2 positions"):
        bench.sample(torch.zeros(1, 9), [0], positions=[1, 2])
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        bench.add({1: Request({"bad_words": ["x"]})})
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        bench.add({1: Request({"logit_bias": {9: 1.0}})})


def test_every_value_that_is_accepted_gives_a_token(kernels: str) -> None:
    rng = np.random.default_rng(0)
    cases = list(itertools.product(reference.accepted_extremes(), (1.0, 1e4, 1e30)))
    cases = cases[:: 1 if ON_GPU or kernels != "triton" else 19]  # the interpreter is slow
    requests = [Request({"seed": 3, **case}, prompt=[1, 2, 5], output=[5, 5, 7]) for case, _ in cases]
    logits = random_logits(rng, len(cases), 50, 1.0) * torch.tensor([scale for _, scale in cases])[:, None]
    with np.errstate(over="raise", invalid="raise", divide="raise") if kernels in ON_CPU else contextlib.nullcontext():
        output = sample_once(kernels, logits, requests)
    assert output.errors == {}
    assert all(0 <= token < 50 for token in output.token_ids)


@pytest.mark.parametrize("kernels", ON_CPU)
def test_features_that_no_row_uses_are_not_touched(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("this should not be computed")

    monkeypatch.setattr(cpu_sampling.CpuSampling, "edit", forbidden)
    monkeypatch.setattr(cpu_sampling, "sample_tokens", forbidden)
    monkeypatch.setattr(cpu_sampling, "_sample_line", forbidden)
    monkeypatch.setattr("headway.runner.sampler.logprob_words", forbidden)
    requests = [Request({"temperature": 0.0}) for _ in range(4)]
    assert sample_once(kernels, torch.eye(4, 9), requests).token_ids == [0, 1, 2, 3]
