"""`wanted_rows`: the same hidden states, only those that are asked for, and the same keys and values in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway import native
from headway.loader import open_checkpoint
from headway.models import Decoder, load_decoder
from tests.unit.models.harness import HandRequest, Harness
from tests.unit.models.tiny import hf_model, random_prompt, save_folder

needs_native = pytest.mark.skipif(not native.is_available(), reason="no C compiler: the native kernels are not built")
KINDS = [("torch", "torch_reference"), ("torch", "torch_padded"), pytest.param("native", "cpu", marks=needs_native)]


def load(folder: Path, ops: str, **options: torch.dtype) -> Decoder:
    return load_decoder(open_checkpoint(save_folder(hf_model("qwen3"), folder)), ops=ops, **options)  # type: ignore[arg-type]


def batch() -> list[tuple[HandRequest, int]]:
    return [(HandRequest(random_prompt(length, seed=length)), length) for length in (7, 1, 12)]


@pytest.mark.parametrize(("ops", "backend"), KINDS)
@pytest.mark.parametrize("wanted", [[6, 7, 19], [19, 0, 7, 7], list(range(20)), [3], []])
def test_wanted_rows_are_rows_of_the_whole(tmp_path: Path, ops: str, backend: str, wanted: list[int]) -> None:
    decoder = load(tmp_path, ops)
    whole_run, part_run = Harness(decoder, backend=backend), Harness(decoder, backend=backend)
    whole, part = whole_run.hidden(batch()), part_run.hidden(batch(), wanted)
    assert part.shape == (len(wanted), decoder.config.hidden_size)
    if ops == "native":
        assert torch.equal(part, whole[wanted])
    else:
        torch.testing.assert_close(part, whole[wanted], rtol=1e-5, atol=2e-6)
    for full, cut in zip(whole_run.attention.kv_caches, part_run.attention.kv_caches, strict=True):
        assert torch.equal(full.k, cut.k) and torch.equal(full.v, cut.v)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_keep_the_dtype_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    decoder = load(tmp_path, "torch", dtype=dtype)
    hidden = Harness(decoder).hidden(batch(), [0, 5])
    logits = decoder.logits(hidden)
    assert logits.dtype == dtype
    assert logits.shape == (2, decoder.config.vocab_size)
