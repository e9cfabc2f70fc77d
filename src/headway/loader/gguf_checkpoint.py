"""A checkpoint in a single GGUF file: weights, configuration, tokenizer and chat template."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.errors import CorruptModelError
from headway.loader.gguf_config import config_from_gguf
from headway.loader.gguf_dequantize import Bytes, dequantize
from headway.loader.gguf_file import GGUFFile
from headway.models.checkpoint import Checkpoint, TensorInfo
from headway.models.decoder_config import DecoderConfig, FrequencyFactors

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer

_ROPE_FACTORS = "rope_freqs.weight"
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFCheckpoint(Checkpoint):
    """Weights in the GGUF file `path`, dequantised as they are read."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.name = str(path)
        self._file = GGUFFile(path)
        self.config = self._with_rope_factors(config_from_gguf(self._file))
        self._interleaved_rope = self._file.metadata["general.architecture"] == "llama"
        tensors = {hf_name(tensor.name): tensor for tensor in self._file.tensors.values()}
        tensors.pop(_ROPE_FACTORS, None)
        self._tensors = tensors
        self.index = {name: TensorInfo(tensor.shape, tensor.num_bytes) for name, tensor in tensors.items()}

    def read(self, name: str, *, device: torch.device | str = "cpu") -> Tensor:
        tensor = self._tensors[name]
        data = self._file.read(tensor.name)
        if self._interleaved_rope and ".self_attn.q_proj." in name:
            data = _pairs_to_halves(data, tensor.shape[0], self.config.num_heads)
        if self._interleaved_rope and ".self_attn.k_proj." in name:
            data = _pairs_to_halves(data, tensor.shape[0], self.config.num_kv_heads)
        return dequantize(tensor, data)

    def tokenizer(self) -> Tokenizer | None:
        if "tokenizer.ggml.model" not in self._file.metadata:
            return None
        from headway.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._file.metadata)

    def _with_rope_factors(self, config: DecoderConfig) -> DecoderConfig:
        tensor = self._file.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return config
        factors = dequantize(tensor, self._file.read(_ROPE_FACTORS)).float().flatten().tolist()
        if not all(0 < factor < math.inf for factor in factors):
            raise CorruptModelError(f"{self.path}: tensor {_ROPE_FACTORS} has values that are not positive numbers")
        return replace(config, rope=replace(config.rope, scaling=FrequencyFactors(tuple(factors))))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; names without one stay as they are."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return name
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _pairs_to_halves(data: Bytes, num_rows: int, num_heads: int) -> Bytes:
    """Reorder the rows of each head; a bias counts as rows of one element.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... and stores q and k of Llama models in that order; here row i
    is rotated with row i + D/2. Whole rows move, so this works on quantised bytes.
    """
    half = num_rows // num_heads // 2
    return data.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(data.shape)
