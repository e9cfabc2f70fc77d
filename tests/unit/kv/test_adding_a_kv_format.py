"""The example of docs/adding_a_kv_format.md, made in a copy of the source: one line, and an engine runs with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.lab.bench.test_offline_bench import SHAPE
from tests.unit.documented_edits import copied, documented_edits, make_edits

USE_FORMAT = """
import sys

import pytest

from headway import LLM, SamplingParams
from headway.errors import ConfigError

options = {
    "load_format": "dummy", "device": "cpu", "num_kv_blocks": 8, "block_size": 16, "kv_cache_dtype": "k4v8",
}
llm = LLM(sys.argv[1], attention_backend="torch_padded", **options)
plan, cache = llm.engine.plan, llm.engine.core.executor._runner.attention.kv_caches[0]
assert plan.kv_dtype == cache.format.name == "k4v8"
assert plan.kv_bytes == 8 * sum(tensor.nbytes for tensor in cache.tensors) // cache.num_blocks * int(sys.argv[2])
assert cache.k.shape[2] * 2 == cache.v.shape[3] == cache.head_dim
[output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 4 and cache.k.any() and cache.scales.any()
llm.shutdown()
for backend, kernels in (("triton", "Triton"), ("auto", "CPU")):
    with pytest.raises(ConfigError, match=f"'k4v8' is not for the {kernels} kernels; use float32, .*, int4"):
        LLM(sys.argv[1], dtype="float32", attention_backend=backend, **options)
"""


def test_the_documented_line_adds_a_format(tmp_path: Path) -> None:
    copied(tmp_path, "src")
    [edits] = documented_edits("adding_a_kv_format.md")
    assert len(make_edits(edits, tmp_path)) == 1
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(SHAPE))
    done = subprocess.run(
        [sys.executable, "-c", USE_FORMAT, str(shape), str(SHAPE["num_hidden_layers"])],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src"), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
