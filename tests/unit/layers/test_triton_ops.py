"""The Triton kernels against `TorchOps`: on the GPU where there is one, elsewhere in Triton's interpreter."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_device import DEVICE, ON_GPU, choose  # isort: split

from headway.attention import HeadNorms, Heads
from headway.kv.layer_cache import LayerKVCache
from headway.kv_formats import FORMATS, KVFormat
from headway.layers import skinny_gemm
from headway.layers.linear import Norm, TorchLinear
from headway.layers.ops import TorchOps
from headway.layers.triton_ops import TritonLinear, TritonOps, meet
from headway.loader import open_checkpoint
from headway.models import Decoder, load_decoder
from tests.unit.models.harness import HandRequest, Harness
from tests.unit.models.tiny import hf_model, random_prompt, save_folder

OPS, EXPECTED = TritonOps(), TorchOps()
EPS = 1e-5

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter cuts bfloat16 off instead of rounding it: up to a whole last bit for each time a value is rounded.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(device=DEVICE, dtype=dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=2 * tolerance)
    if got.dtype is torch.float16 and got.numel() > 500:
        assert (got == expected).float().mean() > 0.99, "it rounds where torch does not"


# ------------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 3), (3, 7), (5, 64), (3, 576), (1, 1000), (2, 4096), (3, 4097), (2, 16384)]
)
def test_norm_adds_the_delta_in_place(rows: int, width: int, with_delta: bool, dtype: torch.dtype) -> None:
    residual, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    delta = randn(rows, width, dtype=dtype) if with_delta else None
    expected_residual = residual.clone()
    expected = EXPECTED.norm(expected_residual, delta, weight, EPS)
    assert_near(OPS.norm(residual, delta, weight, EPS), expected)
    assert_near(residual, expected_residual)
    if not with_delta or dtype is not torch.bfloat16 or ON_GPU:
        assert torch.equal(residual, expected_residual)


def test_rows_do_not_depend_on_the_batch() -> None:
    residual, weight, gate_up = randn(9, 576), randn(576), randn(9, 200)
    whole = OPS.norm(residual, None, weight, EPS)
    activated = OPS.silu_mul(gate_up)
    for row in range(9):
        assert torch.equal(OPS.norm(residual[row : row + 1], None, weight, EPS)[0], whole[row])
        assert torch.equal(OPS.silu_mul(gate_up[row : row + 1])[0], activated[row])


# ----------------------------------------------------------------------------------------------------------- swiglu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 50), (2, 1024), (5, 1536)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 8
    assert_near(OPS.silu_mul(gate_up), EXPECTED.silu_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_of_large_gates() -> None:
    gate_up = torch.tensor([[-200.0, -90.0, 0.0, 200.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    torch.testing.assert_close(OPS.silu_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 400.0]], device=DEVICE))


# ------------------------------------------------------------------------------------------------------------- rope


class RopeCase:
    """Random q, k and v of a few tokens, two of them padding, and a cache for them."""

    def __init__(
        self,
        *,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | KVFormat | None = None,
        with_norms: bool = False,
        token_major: bool = True,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        tokens, num_positions, num_blocks = 4, 20, 7
        self.heads = Heads(num_heads, num_kv_heads, head_dim, randn(num_positions, head_dim), EPS)
        self.qkv = randn(tokens, self.heads.qkv_size, dtype=dtype)
        self.norms = HeadNorms(randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if with_norms else None
        self.positions = torch.randint(0, num_positions, (tokens,)).to(DEVICE, index_dtype)
        self.slots = torch.randperm(num_blocks * block_size)[:tokens].to(DEVICE, index_dtype)
        self.slots[1], self.slots[3] = -1, -7
        self.kv, self.expected_kv = (
            LayerKVCache.zeros(
                num_blocks,
                num_kv_heads,
                head_dim,
                block_size,
                dtype=cache_dtype or dtype,
                device=DEVICE,
                token_major=token_major,
            )
            for _ in range(2)
        )
        for kv in (self.kv, self.expected_kv):
            for fill, tensor in enumerate(kv.tensors, start=3):
                tensor.fill_(fill)

    def run(self) -> Tensor:
        return OPS.rope_write_kv(self.qkv, self.positions, self.slots, self.heads, self.norms, self.kv)

    def expected(self) -> Tensor:
        """q of all tokens; only tokens with a slot go to the cache."""
        real = self.slots >= 0
        kv = self.expected_kv
        arguments = (self.heads, self.norms)
        EXPECTED.rope_write_kv(self.qkv[real], self.positions[real], self.slots[real], *arguments, kv)
        elsewhere = LayerKVCache(kv.format, *(torch.zeros_like(tensor) for tensor in kv.tensors))
        return EXPECTED.rope_write_kv(self.qkv, self.positions, torch.arange(4, device=DEVICE), *arguments, elsewhere)

    def check(self) -> None:
        assert_near(self.run(), self.expected())
        assert_near(self.kv.k, self.expected_kv.k)
        assert torch.equal(self.kv.v, self.expected_kv.v)


def as_written(kv: LayerKVCache) -> list[Tensor]:
    """Codes as bytes, which can be compared to the bit; scales as they are."""
    return [tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor for tensor in kv.tensors]


@pytest.mark.parametrize("quantised", ["fp8", "int8", "int4"])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "token_major"),
    choose(
        itertools.product((64, 80), DTYPES, (False, True)),
        (64, torch.float32, False),
        (64, torch.bfloat16, True),
        (80, torch.float16, True),
        (80, torch.bfloat16, False),
    ),
)
def test_rope_into_a_quantised_cache(head_dim: int, dtype: torch.dtype, quantised: str, token_major: bool) -> None:
    """Codes and scales of the reference, to the bit; the rotation turns by whole quarters, which is exact."""
    case = RopeCase(head_dim=head_dim, dtype=dtype, cache_dtype=FORMATS[quantised], token_major=token_major)
    case.qkv *= torch.logspace(-6, 3, 4, device=DEVICE)[:, None].to(dtype)
    case.qkv[0, -head_dim:] = 0.0
    case.qkv[2] = torch.arange(case.qkv.shape[1], device=DEVICE).remainder(29) - 14.0  # many ties
    case.slots[1], case.slots[3] = 50, 71
    half = head_dim // 2
    case.heads.cos_sin[:, :half], case.heads.cos_sin[:, half:] = 0.0, 1.0
    assert torch.equal(case.run(), case.expected())
    for got, wanted in zip(as_written(case.kv), as_written(case.expected_kv), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("quantised", ["fp8", "int8", "int4"])
def test_padding_and_norms_with_a_quantised_cache(quantised: str) -> None:
    case = RopeCase(with_norms=True, cache_dtype=FORMATS[quantised])
    assert_near(case.run(), case.expected())
    for got, wanted in zip(
        case.kv.read_blocks(torch.arange(7, device=DEVICE), torch.float32),
        case.expected_kv.read_blocks(torch.arange(7, device=DEVICE), torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0.07, atol=0.05)  # a code may differ by one
        assert ((got == wanted).float().mean() > 0.98).item()


ROPE_CASES: list[dict[str, Any]] = [
    *(
        {"head_dim": head_dim, "with_norms": with_norms, "dtype": dtype}
        for head_dim, with_norms, dtype in itertools.product((64, 80, 96, 128, 256), (False, True), DTYPES)
    ),
    *(
        {"block_size": block_size, "token_major": token_major, "index_dtype": index_dtype, "with_norms": True}
        for block_size, token_major, index_dtype in itertools.product(
            (1, 5, 16), (False, True), (torch.int32, torch.int64)
        )
    ),
    *(
        {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for num_heads, num_kv_heads in ((1, 1), (9, 3), (8, 8), (24, 4))
        for head_dim in (2, 24, 128)
    ),
    {"cache_dtype": torch.float16},
    {"num_heads": 24, "head_dim": 128, "dtype": torch.float16, "with_norms": True},
]


@pytest.mark.parametrize("options", ROPE_CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_rope_write_kv(options: dict[str, Any]) -> None:
    RopeCase(**options).check()


def test_rope_does_not_depend_on_the_batch() -> None:
    case = RopeCase(with_norms=True)
    whole = case.run()
    for t in range(4):
        one = slice(t, t + 1)
        alone = OPS.rope_write_kv(
            case.qkv[one], case.positions[one], case.slots[one], case.heads, case.norms, case.expected_kv
        )
        assert torch.equal(alone[0], whole[t])
    assert torch.equal(case.kv.k, case.expected_kv.k)


def test_what_the_kernels_would_read_wrongly_is_refused() -> None:
    case = RopeCase()
    with pytest.raises(ValueError, match="positions has shape"):
        OPS.rope_write_kv(case.qkv, case.positions[:3], case.slots, case.heads, None, case.kv)
    with pytest.raises(ValueError, match="do not fit"):
        OPS.rope_write_kv(case.qkv[:, :-64].contiguous(), case.positions, case.slots, case.heads, None, case.kv)
    with pytest.raises(ValueError, match="qkv must be contiguous"):
        OPS.rope_write_kv(randn(640, 4).t(), case.positions, case.slots, case.heads, None, case.kv)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        OPS.norm(randn(8, 4).t(), None, randn(8), EPS)
    with pytest.raises(ValueError, match="delta has shape"):
        OPS.norm(randn(4, 8), randn(3, 8), randn(8), EPS)


# ---------------------------------------------------------------------------------------------------------- matmuls


def test_a_linear_without_fused_forms_leaves_its_product_to_the_next_norm() -> None:
    x, residual, weight = randn(5, 48), randn(5, 32), randn(32)
    down, qkv = TorchLinear(randn(32, 48)), TorchLinear(randn(20, 32))
    delta = down.into_residual(weight)(residual, x)
    assert isinstance(delta, Tensor) and torch.equal(delta, down(x))
    total = residual + delta
    expected = qkv(EXPECTED.norm(total, None, weight, EPS))
    product = qkv.after_norm(Norm(weight, EPS, OPS.norm))(residual, delta)
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(residual, total)


@pytest.fixture
def skinny_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the fused matmuls were called, and with what fused in. They run all the same."""
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Tensor | None]:
        function = getattr(skinny_gemm, name)

        def call(*arguments: object, **options: object) -> Tensor | None:
            given = (option for option, value in options.items() if value is not None and value is not False)
            fused = [option for option in given if option != "eps"]
            calls.append(" ".join([name, *fused]))
            return function(*arguments, **options)

        return call

    for name in ("one_row", "split_add", "scaled_linear", "swiglu"):
        monkeypatch.setattr(skinny_gemm, name, watched(name))
    return calls


def near_half(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=5e-2)


ONE_ROW_NORMS = ["one_row norm", "one_row norm swiglu"]


@pytest.mark.parametrize(
    ("rows", "fused"),
    [
        (1, [*ONE_ROW_NORMS, "one_row residual", "one_row out", *ONE_ROW_NORMS]),
        (5, ["swiglu", "split_add", "scaled_linear", "swiglu squares"]),
        (65, []),
    ],
)
def test_few_rows_go_to_the_fused_matmuls(skinny_calls: list[str], rows: int, fused: list[str]) -> None:
    dtype = torch.float16
    residual, weight = randn(rows, 32, dtype=dtype), randn(32, dtype=dtype)
    linear = TritonLinear(randn(32, 32, dtype=dtype), randn(32, dtype=dtype))
    gate_up = TritonLinear(randn(16, 32, dtype=dtype) / 4)
    norm = Norm(weight, EPS, OPS.norm)
    product, activated = linear.after_norm(norm), gate_up.after_norm(norm, OPS.silu_mul)
    plain, plain_gate_up = TorchLinear(linear.weight, linear.bias), TorchLinear(gate_up.weight)
    plain_norm = Norm(weight, EPS, EXPECTED.norm)
    wanted, wanted_gated = plain.after_norm(plain_norm), plain_gate_up.after_norm(plain_norm, EXPECTED.silu_mul)
    near_half(product(residual, None), wanted(residual, None))
    near_half(activated(residual, None), wanted_gated(residual, None))
    x, before = randn(rows, 32, dtype=dtype), residual.clone()
    delta = linear.into_residual(weight)(residual, x)
    near_half(residual, before + plain(x))
    out = torch.full((rows + 1, 16), 9.0, dtype=dtype, device=DEVICE)
    assert gate_up(x, out[:rows]).data_ptr() == out.data_ptr()
    near_half(out[:rows], plain_gate_up(x))
    assert (out[rows] == 9.0).all()
    # What the sum has left to the next norm, whichever of the three follows it.
    total = residual.clone()
    near_half(norm(residual, delta), plain_norm(total, None))
    near_half(product(residual, delta), wanted(total, None))
    near_half(activated(residual, delta), wanted_gated(total, None))
    assert torch.equal(residual, total)
    assert skinny_calls == fused


def test_a_delta_is_added_by_the_norm_kernel(skinny_calls: list[str]) -> None:
    residual, delta, weight = (randn(*shape, dtype=torch.float16) for shape in ((1, 32), (1, 32), (32,)))
    linear, total = TritonLinear(randn(8, 32, dtype=torch.float16)), residual + delta
    product = linear.after_norm(Norm(weight, EPS, OPS.norm))(residual, delta)
    near_half(product, TorchLinear(linear.weight)(EXPECTED.norm(total, None, weight, EPS)))
    assert torch.equal(residual, total)
    assert skinny_calls == ["one_row"]


def test_without_skinny_matmuls_and_in_float32_cublas_takes_all(skinny_calls: list[str]) -> None:
    for skinny, dtype in ((False, torch.float16), (True, torch.float32)):
        residual, weight = randn(1, 32, dtype=dtype), randn(32, dtype=dtype)
        linear = TritonLinear(randn(32, 32, dtype=dtype), skinny=skinny)
        norm = Norm(weight, EPS, OPS.norm)
        linear.after_norm(norm)(residual, None)
        linear.after_norm(norm, OPS.silu_mul)(residual, None)
        linear(residual)
        linear.into_residual(weight)(residual, residual.clone())
    assert not skinny_calls


# ---------------------------------------------------------------------------------------------------- a whole decoder


def logits_of_three_steps(decoder: Decoder) -> Tensor:
    """Two requests, in steps of one token, of a chunk, and of both."""
    harness = Harness(decoder, block_size=4, token_major=True)
    first, second = HandRequest(random_prompt(8)), HandRequest(random_prompt(3, seed=1))
    harness.step([(first, 5)])
    harness.step([(first, 1), (second, 3)])
    harness.step([(first, 1)])
    return torch.stack(first.logits + second.logits)


def test_ranks_meet_when_all_have_come() -> None:
    """The second of three: it says to all that it has come, and goes on when the last one has."""
    flags = [torch.zeros(3, dtype=torch.int64, device=DEVICE) for _ in range(3)]
    addresses = torch.tensor([one.data_ptr() for one in flags], dtype=torch.int64, device=DEVICE)
    turn = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    beside = torch.cuda.Stream() if ON_GPU else None

    def come() -> None:
        with torch.cuda.stream(beside):
            flags[1][2:] += 1

    for number in (1, 2):
        flags[1][:1] = 5  # it has been here more often
        timer = threading.Timer(0.3, come)
        started_s = time.monotonic()
        timer.start()
        meet(flags[1], addresses, turn, rank=1)
        assert turn.tolist() == [number]
        assert time.monotonic() - started_s > 0.25, "it has not waited"
        timer.join()
        assert [one.tolist() for one in flags] == [[0, number, 0], [5, number, number], [0, number, 0]]


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("llama_biased", torch.float32, 1e-5),
        ("mistral", torch.float32, 1e-5),
        ("qwen3", torch.float32, 1e-5),
        ("llama_biased", torch.float16, 5e-3),
    ],
)
def test_whole_decoder(
    tmp_path: Path, skinny_calls: list[str], family: str, dtype: torch.dtype, tolerance: float
) -> None:
    checkpoint = open_checkpoint(save_folder(hf_model(family), tmp_path))
    got, exact = (
        logits_of_three_steps(load_decoder(checkpoint, device=DEVICE, dtype=one, ops=ops))
        for one, ops in ((dtype, OPS), (torch.float32, EXPECTED))
    )
    assert (got - exact).norm() / exact.norm() < tolerance
    fused = {"one_row", "split_add", "scaled_linear", "swiglu"} if dtype is torch.float16 else set()
    assert {call.split()[0] for call in skinny_calls} == fused
