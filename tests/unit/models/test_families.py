"""Every family gives the logits of transformers, however the prompt is cut and whatever shares the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headway import native
from headway.layers.native_ops import NativeOps
from headway.layers.ops import Ops, TorchOps
from headway.loader import open_checkpoint
from headway.models import Decoder, load_decoder
from tests.unit.models.harness import HandRequest, Harness
from tests.unit.models.tiny import FAMILIES, hf_logits, hf_model, random_prompt, save_folder

ATOL = 1e-5


needs_native = pytest.mark.skipif(not native.is_available(), reason="no C compiler: the native kernels are not built")


def load(folder: Path) -> Decoder:
    return load_decoder(open_checkpoint(folder), ops=TorchOps())


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Decoder]:
    model = hf_model(request.param)
    return model, load(save_folder(model, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("chunk_size", [None, 1, 7])
@pytest.mark.parametrize("backend", ["torch_reference", "torch_padded"])
def test_logits_match_transformers(family: tuple[object, Decoder], chunk_size: int | None, backend: str) -> None:
    model, decoder = family
    prompt = random_prompt(90)
    logits = Harness(decoder, backend=backend).prompt_logits(prompt, chunk_size)
    torch.testing.assert_close(logits, hf_logits(model, prompt), atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("backend", ["torch_reference", "torch_padded"])
def test_requests_of_one_batch_do_not_mix(family: tuple[object, Decoder], backend: str, token_major: bool) -> None:
    model, decoder = family
    harness = Harness(decoder, backend=backend, block_size=8, token_major=token_major)
    requests = [HandRequest(random_prompt(length, seed=length)) for length in (30, 11, 1, 19)]
    first, second, third, fourth = requests
    harness.step([(first, 12), (second, 3)])
    harness.step([(third, 1), (first, 1), (second, 7)])
    harness.step([(second, 1), (fourth, 19), (first, 17)])
    for request in requests:
        assert request.num_computed == len(request.token_ids)
        expected = hf_logits(model, request.token_ids)
        torch.testing.assert_close(torch.stack(request.logits), expected, atol=ATOL, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("name", list(FAMILIES))
def test_native_kernels_give_the_same_logits_to_the_bit_in_any_chunking(tmp_path: Path, name: str) -> None:
    model = hf_model(name)
    decoder = load_decoder(open_checkpoint(save_folder(model, tmp_path)), ops=NativeOps())
    prompt = random_prompt(60)
    whole = Harness(decoder, backend="cpu").prompt_logits(prompt)
    torch.testing.assert_close(whole, hf_logits(model, prompt), atol=ATOL, rtol=1e-5)
    for chunk_size, block_size in ((1, 16), (7, 1), (32, 4)):
        harness = Harness(decoder, backend="cpu", block_size=block_size)
        assert torch.equal(harness.prompt_logits(prompt, chunk_size), whole)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("name", "options", "backend", "limit"),
    [
        pytest.param("llama_tied", {"quantization": "int8"}, "cpu", 0.05, marks=needs_native),
        pytest.param("qwen2", {"quantization": "int8"}, "cpu", 0.05, marks=needs_native),
        pytest.param("qwen3", {"quantization": "int8"}, "cpu", 0.05, marks=needs_native),
        ("qwen3", {"dtype": torch.bfloat16}, "torch_reference", 0.03),
        ("qwen3", {"dtype": torch.bfloat16}, "torch_padded", 0.03),
    ],
)
def test_fewer_bits_are_near_float32(
    tmp_path: Path, name: str, options: dict[str, Any], backend: str, limit: float
) -> None:
    model, prompt = hf_model(name), random_prompt(40)
    ops = NativeOps() if backend == "cpu" else TorchOps()
    decoder = load_decoder(open_checkpoint(save_folder(model, tmp_path)), ops=ops, **options)
    expected = hf_logits(model, prompt)
    logits = Harness(decoder, backend=backend).prompt_logits(prompt, chunk_size=9)
    assert (logits - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_files_compute_in_float32(tmp_path: Path, stored: torch.dtype) -> None:
    checkpoint = open_checkpoint(save_folder(hf_model("llama").to(stored), tmp_path))
    widened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert checkpoint.config.torch_dtype == str(stored).removeprefix("torch.")
    prompt = random_prompt(16)
    logits = Harness(load_decoder(checkpoint, ops=TorchOps())).prompt_logits(prompt)
    torch.testing.assert_close(logits, hf_logits(widened, prompt), atol=ATOL, rtol=1e-5)


KINDS = [(TorchOps, "torch_reference"), (TorchOps, "torch_padded"), pytest.param(NativeOps, "cpu", marks=needs_native)]


def batch() -> list[tuple[HandRequest, int]]:
    return [(HandRequest(random_prompt(length, seed=length)), length) for length in (7, 1, 12)]


@pytest.mark.parametrize(("ops", "backend"), KINDS)
@pytest.mark.parametrize("wanted", [[6, 7, 19], [19, 0, 7, 7], list(range(20)), [3], []])
def test_wanted_rows_are_rows_of_the_whole(tmp_path: Path, ops: type[Ops], backend: str, wanted: list[int]) -> None:
    decoder = load_decoder(open_checkpoint(save_folder(hf_model("qwen3"), tmp_path)), ops=ops())
    whole_run, part_run = Harness(decoder, backend=backend), Harness(decoder, backend=backend)
    whole, part = whole_run.hidden(batch()), part_run.hidden(batch(), wanted)
    assert part.shape == (len(wanted), decoder.config.hidden_size)
    if ops is NativeOps:
        assert torch.equal(part, whole[wanted])
    else:
        torch.testing.assert_close(part, whole[wanted], rtol=1e-5, atol=2e-6)
    for full, cut in zip(whole_run.attention.kv_caches, part_run.attention.kv_caches, strict=True):
        assert torch.equal(full.k, cut.k) and torch.equal(full.v, cut.v)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_keep_the_dtype_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    decoder = load_decoder(open_checkpoint(save_folder(hf_model("qwen3"), tmp_path)), ops=TorchOps(), dtype=dtype)
    hidden = Harness(decoder).hidden(batch(), [0, 5])
    logits = decoder.logits(hidden)
    assert logits.dtype == dtype
    assert logits.shape == (2, decoder.config.vocab_size)
