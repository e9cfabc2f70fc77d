"""Ranks with the GPU's kernels, in the interpreter, which threads cannot share: processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_device import ON_GPU  # isort: split

from headway import LLM, SamplingParams
from tests.unit.loader.test_quantized_weights import write

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo is for the CPU")


def test_tokens_of_one(tmp_path: Path) -> None:
    """Of layers with codes and one of floats."""
    path, _ = write("fp8 rows", tmp_path)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=3, ignore_eos=True, detokenize=False)
    found = []
    for size, options in ((1, {}), (2, {"collectives": "gloo"})):
        llm = LLM(
            str(path),
            dtype="float32",
            max_model_len=16,
            max_num_seqs=2,
            num_kv_blocks=4,
            attention_backend="triton",
            device="cpu",
            tensor_parallel_size=size,
            **options,
        )
        outputs = llm.generate([[5, 9, 17], [8]], params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        llm.shutdown()
    assert found[0] == found[1]
