"""A checkpoint in a single GGUF file: weights, configuration, tokenizer and chat template.

Tensors become floats as they are read: by the native kernels for the common types, by the gguf package for all others.
The metadata becomes a `DecoderConfig` by way of the configuration Hugging Face would have written. An engine without a
model reads only that, so torch is imported with the first tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import CorruptModelError, MissingTensorError, UnsupportedModelError
from headway.loader.gguf_file import BF16, F16, F32, Q4_0, Q4_1, Q8_0, GGUFFile, GGUFTensor
from headway.models.checkpoint import Checkpoint, TensorInfo
from headway.models.decoder_config import DecoderConfig, FrequencyFactors
from headway.models.hf_config import RawConfig, cap_to_window, config_from_hf, yarn_attention_factor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.tokenizer import Tokenizer

# GGUF's name of an architecture -> the class whose configuration it is. Mistral models are "llama" in GGUF.
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_FILE_TYPE_DTYPES = {0: "float32", 1: "float16"}

_STORED_AS_FLOATS = {F32: "float32", F16: "float16", BF16: "bfloat16"}
_NATIVE = (Q4_0, Q4_1, Q8_0)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

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


def dequantize(tensor: GGUFTensor, data: Bytes) -> Tensor:
    """`data` uint8 [rows, bytes per row] -> a float tensor of the tensor's shape; quantised types become float32."""
    import torch

    from headway import native

    dtype = _STORED_AS_FLOATS.get(tensor.type)
    if dtype is not None:
        return torch.from_numpy(data).view(getattr(torch, dtype)).view(tensor.shape)
    if tensor.type in _NATIVE and native.is_available():
        return native.dequantize(tensor.type.name, torch.from_numpy(data), tensor.shape)
    return _dequantize_with_library(tensor, data)


def _dequantize_with_library(tensor: GGUFTensor, data: Bytes) -> Tensor:
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as library_dequantize

    try:
        values = library_dequantize(data, GGMLQuantizationType(tensor.type.id))
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {tensor.name} is of GGUF type {tensor.type.name}, which the gguf package cannot dequantise"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(tensor.shape)


def config_from_gguf(file: GGUFFile) -> DecoderConfig:
    """Everything but the rope frequency factors, which are a tensor."""
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(f"{file.path} is one part of a split GGUF file; merge it with llama-gguf-split")
    metadata = _ArchitectureMetadata(file, architecture)
    if metadata.get("expert_count"):
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported")
    hidden_size, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    max_position = metadata.integer("context_length")
    raw = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(metadata, head_dim, max_position),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _declared_dtype(file),
    }
    config = replace(
        config_from_hf(raw, str(file.path)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )
    window = metadata.get("attention.sliding_window")
    return cap_to_window(config, window if isinstance(window, int) else None)


class _ArchitectureMetadata(RawConfig):
    """The metadata under one architecture's name, by the rest of its key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        prefix = architecture + "."
        mine = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(mine, f"{file.path}: {architecture}")

    def get(self, key: str) -> Any:
        return self.values.get(key)


def _declared_dtype(file: GGUFFile) -> str:
    """For quantised files, the half-precision format in which no model overflows."""
    file_type = file.metadata.get("general.file_type")
    return _FILE_TYPE_DTYPES.get(file_type, "bfloat16") if isinstance(file_type, int) else "bfloat16"


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise MissingTensorError(f"{file.path} lacks token_embd.weight; is it a language model?")
    return embedding.shape[0]


def _rope_parameters(metadata: _ArchitectureMetadata, head_dim: int, max_position: int) -> dict[str, Any]:
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{metadata.source}: rotating only {rotated} of each head's {head_dim} elements is not supported"
        )
    rope = {"rope_theta": metadata.number("rope.freq_base", 10000.0)}
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0
    kind = metadata.text("rope.scaling.type", "linear")
    if kind == "none":
        return rope
    if kind == "linear":
        return rope if factor == 1.0 else {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if metadata.get("rope.scaling.yarn_ext_factor") not in (None, 1.0, -1.0):  # below 0 stands for the default, 1
            raise UnsupportedModelError(f"{metadata.source}: a YaRN with rope.scaling.yarn_ext_factor is not supported")
        return {
            **rope,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length", max_position),
            "attention_factor": _yarn_sharpening(metadata, factor),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnsupportedModelError(
        f"{metadata.source}: rope scaling {kind!r} is not supported; supported are none, linear, yarn"
    )


def _yarn_sharpening(metadata: _ArchitectureMetadata, factor: float) -> float:
    """llama.cpp multiplies YaRN's own rule by what the file says."""
    extra = metadata.number("rope.scaling.attn_factor", metadata.number("rope.scaling.yarn_attn_factor", 1.0))
    return yarn_attention_factor(factor) * extra
