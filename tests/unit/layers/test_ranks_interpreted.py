"""Ranks with the GPU's kernels, in the interpreter, which threads cannot share: processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_device import ON_GPU  # isort: split

from headway import LLM, SamplingParams
from tests.unit.loader.test_quantized_weights import write
from tests.unit.models.tiny import hf_model, save_folder

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo is for the CPU")


@pytest.mark.parametrize("name", ["floats", "fp8 rows"])
def test_tokens_of_one(name: str, tmp_path: Path) -> None:
    small = hf_model("llama_biased", num_hidden_layers=1)
    path = save_folder(small, tmp_path) if name == "floats" else write(name, tmp_path)[0]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=4, ignore_eos=True, detokenize=False)
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
