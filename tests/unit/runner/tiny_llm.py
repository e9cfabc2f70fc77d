"""A model small enough for Triton's interpreter, on the GPU runner and, as its reference, on the plain CPU engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_device import DEVICE, ON_GPU  # isort: split

from headway import LLM
from headway.attention import triton_paged
from headway.loader import dummy
from headway.outputs import CompletionOutput

VOCAB_SIZE = 199
MAX_MODEL_LEN = 48

_SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],  # with norms of queries and keys, so that random weights attend to something
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


class TinyLLM:
    """Makes engines of one model. Its weights are ten times as large as those of other dummies: every part matters."""

    def __init__(self, folder: Path, max_model_len: int = MAX_MODEL_LEN, **shape: int) -> None:
        self.max_model_len = max_model_len
        self.path = folder / "tiny.json"
        self.path.write_text(json.dumps(_SHAPE | {"max_position_embeddings": max_model_len} | shape))

    def on_cpu(self, **options: Any) -> LLM:
        """The reference: float32, one step at a time."""
        return self._make(device="cpu", dtype="float32", quantization="none", **options)

    def on_gpu(self, **options: Any) -> LLM:
        """The GPU runner, with small limits, so that padding costs the interpreter little; and nothing overlaps."""
        small = {
            "max_num_seqs": 6,
            "max_num_batched_tokens": 16,
            "block_size": 8,
            "async_scheduling": False,
            "dtype": "float32",
        }
        fixed = {"device": DEVICE.type, "attention_backend": "triton"}
        memory = {} if "num_kv_blocks" in options else {"kv_cache_memory": 2**20}
        return self._make(**fixed, **{**small, **memory, **options})

    def _make(self, **options: Any) -> LLM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dummy, "_STD", 0.2)
            patch.setattr(dummy.DummyCheckpoint, "read", _drawn_on_the_cpu(dummy.DummyCheckpoint.read))
            if not ON_GPU:  # a step has as many programs without work as a device could run more
                patch.setattr(triton_paged, "num_processors", lambda device: 1)
            return LLM(str(self.path), load_format="dummy", max_model_len=self.max_model_len, **options)


def _drawn_on_the_cpu(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same weights everywhere: a GPU's generator draws others."""

    def drawn(checkpoint: dummy.DummyCheckpoint, name: str, *, device: torch.device | str = "cpu") -> torch.Tensor:
        return read(checkpoint, name).to(device)

    return drawn


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def finish_all(llm: LLM) -> tuple[dict[str, CompletionOutput], dict[str, str]]:
    """Steps until no request is left: the last outputs and the errors, by request."""
    done, errors = {}, {}
    while llm.engine.has_unfinished_requests():
        step = llm.engine.step()
        done |= {output.request_id: output.outputs[0] for output in step.outputs}
        errors |= step.errors
        llm.engine.check_invariants()
    return done, errors
