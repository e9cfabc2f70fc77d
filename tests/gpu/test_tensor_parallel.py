"""Two ranks on one GPU: the tokens of one, with CUDA graphs and steps planned ahead. The GPU takes turns between them,
so it takes a while; under NVIDIA's MPS it does not."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headway import LLM, SamplingParams
from headway.core import DiskIndex
from headway.errors import EngineDeadError
from headway.sampling_params import StructuredOutputsParams
from headway.transfer.block_store import Done
from headway.transfer.disk_store import DiskStore
from tests.integration.test_tensor_parallel import children, tokens
from tests.unit.loader.test_quantized_weights import write, write_gguf
from tests.unit.models.tiny import hf_model, save_folder
from tests.unit.tokenizer.small import trained_backend

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "num_kv_blocks": 64,
    "max_num_batched_tokens": 64,
    "num_rounds": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs, a cache that is too small": {"enforce_eager": True, "num_kv_blocks": 14, "block_size": 4},
    "guesses": {"speculation": "ngram"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_on_one_gpu(variant: str, tmp_path: Path) -> None:
    folder = str(save_folder(hf_model("qwen3", num_hidden_layers=1), tmp_path))
    options = {**SMALL, **VARIANTS[variant]}
    assert tokens(folder, tensor_parallel_size=2, **options) == tokens(folder, **options)
    assert not children()


def test_blocks_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine's prompts come from files: each has the parts of both ranks."""
    monkeypatch.setattr(DiskIndex, "is_worth_fetching", lambda *_: True)
    folder = str(save_folder(hf_model("qwen3", num_hidden_layers=1), tmp_path / "model"))
    options = {**SMALL, "block_size": 4, "num_rounds": 1}
    expected, own = tokens(folder, **options), {**options, "disk_cache": str(tmp_path / "kv")}
    assert tokens(folder, tensor_parallel_size=2, **own) == expected
    files = {path.name for path in (tmp_path / "kv").rglob("*.kv")}
    assert files
    fetched: list[bytes] = []
    fetch = DiskStore.fetch

    def noted(
        store: DiskStore, digests: Sequence[bytes], slots: Sequence[Slot], source: str, done: Done, *, is_use: bool
    ) -> None:
        fetched.extend(digests)
        fetch(store, digests, slots, source, done, is_use=is_use)

    monkeypatch.setattr(DiskStore, "fetch", noted)
    assert tokens(folder, tensor_parallel_size=2, **own) == expected
    assert fetched and {f"{digest.hex()}.kv" for digest in fetched} <= files


FORM = {"type": "object", "properties": {"n": {"enum": ["one", "two"]}}, "required": ["n"]}
GUIDED: list[dict[str, Any]] = [
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="(cat|dog)( and (cat|dog)){3}")},
    {"temperature": 0.9, "seed": 3, "structured_outputs": StructuredOutputsParams(json=FORM)},
    {"temperature": 0.9, "seed": 3, "allowed_token_ids": list(range(40, 90)), "ignore_eos": True},
    {"temperature": 0.0, "ignore_eos": True},
]


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_structured_output(speculation: str, tmp_path: Path) -> None:
    """All ranks get the same masks, behind the step that they are for."""
    backend = trained_backend(digits_apart=False)
    folder = save_folder(hf_model("qwen3", num_hidden_layers=1, vocab_size=backend.get_vocab_size()), tmp_path)
    backend.save(str(folder / "tokenizer.json"))
    params = [SamplingParams(max_tokens=24, **options) for options in GUIDED]
    size = {key: value for key, value in SMALL.items() if key != "num_rounds"}

    def answers(**options: Any) -> list[tuple[list[int], str]]:
        llm = LLM(str(folder), speculation=speculation, **{**size, **options})
        try:
            found = [llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False) for _ in range(2)]
            return [(one.outputs[0].token_ids, one.outputs[0].text) for one in itertools.chain(*found)]
        finally:
            llm.shutdown()

    expected = answers()
    assert re.fullmatch("(cat|dog)( and (cat|dog)){3}", expected[0][1])
    assert answers(tensor_parallel_size=2) == expected


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """Rank 0 waits for it on the device, and is let go."""
    folder = str(save_folder(hf_model("qwen3", num_hidden_layers=1, max_position_embeddings=4096), tmp_path))
    llm = LLM(folder, tensor_parallel_size=2, device="cuda", dtype="float32", max_model_len=2048, num_kv_blocks=1024)
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True, detokenize=False)
    (pid,) = children()
    threading.Timer(3.0, os.kill, (pid, signal.SIGKILL)).start()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\) ended with SIGKILL"):
            llm.generate([[1, 2, 3]] * 4, params, use_tqdm=False)
    llm.shutdown()
    torch.cuda.synchronize()
    assert not children()


class TestWeights:
    """A class of their own: workers that take whole classes share the ranks' tests."""

    @pytest.mark.parametrize("family", ["llama_biased", "mistral", "qwen2"])
    def test_families(self, family: str, tmp_path: Path) -> None:
        folder = str(save_folder(hf_model(family, num_hidden_layers=1), tmp_path))
        options = {**SMALL, "num_requests": 2}
        assert tokens(folder, tensor_parallel_size=2, **options) == tokens(folder, **options)

    @pytest.mark.parametrize("name", ["gptq desc_act", "awq", "int4", "int8", "fp8 rows", "fp8 blocks", "Q4_K"])
    def test_stored_formats(self, name: str, tmp_path: Path) -> None:
        path, _ = write_gguf(name, tmp_path) if name.startswith("Q") else write(name, tmp_path)
        options = {**SMALL, "num_rounds": 1, "num_requests": 2}
        assert tokens(str(path), tensor_parallel_size=2, **options) == tokens(str(path), **options)

    @pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
    def test_formats_made_at_load(self, quantization: str, tmp_path: Path) -> None:
        """Scales are those of whole rows, whoever has a part of them."""
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
        folder = str(save_folder(hf_model("llama", **shape), tmp_path))
        options = {**SMALL, "num_rounds": 1, "num_requests": 2, "quantization": quantization}
        assert tokens(folder, tensor_parallel_size=2, **options) == tokens(folder, **options)
