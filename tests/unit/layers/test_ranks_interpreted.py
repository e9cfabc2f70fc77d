"""Ranks with the GPU's kernels, in the interpreter, which threads cannot share: processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_device import ON_GPU  # isort: split

from tests.integration.test_tensor_parallel import SMALL, tokens
from tests.unit.loader.test_quantized_weights import write
from tests.unit.models.tiny import hf_model, save_folder

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo is for the CPU")


@pytest.mark.parametrize("name", ["floats", "fp8 rows", "int4"])
def test_tokens_of_one(name: str, tmp_path: Path) -> None:
    path = save_folder(hf_model("llama_biased"), tmp_path) if name == "floats" else write(name, tmp_path)[0]
    options = {**SMALL, "attention_backend": "triton", "device": "cpu", "max_num_seqs": 2}
    expected = tokens(str(path), **options)
    assert tokens(str(path), tensor_parallel_size=2, collectives="gloo", **options) == expected
