"""A checkpoint in a single GGUF file: weights, configuration, tokenizer and chat template.

Linear layers' weights are read as codes and scales if their type is one of `PACKED_TYPES`. All other tensors become
floats as they are read: by the native kernels for the common types, by the gguf package for the rest. The metadata is
turned into the configuration Hugging Face would have written, and that into a `DecoderConfig`. A process without a
model reads only the metadata, so torch is imported with the first tensor.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import CorruptModelError, MissingTensorError, UnsupportedModelError
from headway.loader.gguf_file import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, GGUFFile, GGUFTensor
from headway.models.checkpoint import Checkpoint, TensorInfo
from headway.models.decoder_config import DecoderConfig, FrequencyFactors
from headway.models.hf_config import RawConfig, cap_to_window, config_from_hf, yarn_attention_factor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.layers.quantized_weight import QuantizedWeight, Weight
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
    """Weights in the GGUF file `path`; `name` is what the user asked for (the file itself, or a hub id)."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path: Path = path
        self.name = name or str(path)
        self._file = GGUFFile(path)
        self.config = self._with_rope_factors(config_from_gguf(self._file))
        self._interleaved_rope = self._file.metadata["general.architecture"] == "llama"
        tensors = {hf_name(tensor.name): tensor for tensor in self._file.tensors.values()}
        tensors.pop(_ROPE_FACTORS, None)
        self._tensors = tensors
        self.index = {name: TensorInfo(tensor.shape, tensor.num_bytes) for name, tensor in tensors.items()}
        self.quantized = {name for name, tensor in tensors.items() if tensor.type in PACKED_TYPES}
        if self.quantized:
            types = Counter(tensors[name].type.name for name in self.quantized)
            self.config = replace(self.config, stored=types.most_common(1)[0][0])

    def read(self, name: str, *, device: torch.device | str = "cpu") -> Tensor:
        return dequantize(self._tensors[name], self._read(name))

    def read_weight(self, name: str, *, device: torch.device | str = "cpu") -> Weight:
        tensor = self._tensors[name]
        decode = PACKED_TYPES.get(tensor.type)
        return self.read(name) if decode is None else decode(self._read(name), tensor.shape[-1])

    def _read(self, name: str) -> Bytes:
        tensor = self._tensors[name]
        data = self._file.read(tensor.name)
        if self._interleaved_rope and ".self_attn.q_proj." in name:
            data = _pairs_to_halves(data, tensor.shape[0], self.config.num_heads)
        if self._interleaved_rope and ".self_attn.k_proj." in name:
            data = _pairs_to_halves(data, tensor.shape[0], self.config.num_kv_heads)
        return data

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


# ---- quantised types as codes and scales; a row of bytes is a row of blocks -----------------------------------------


def _q4_0(data: Bytes, num_inputs: int) -> QuantizedWeight:
    blocks = data.reshape(len(data), -1, Q4_0.block_bytes)
    return _quantized(_nibbles(blocks[:, :, 2:]) - np.int8(8), _floats(blocks[:, :, :2]), num_inputs, bits=4)


def _q4_1(data: Bytes, num_inputs: int) -> QuantizedWeight:
    blocks = data.reshape(len(data), -1, Q4_1.block_bytes)
    scales, offsets = _floats(blocks[:, :, :2]), _floats(blocks[:, :, 2:4])
    return _quantized(_nibbles(blocks[:, :, 4:]), scales, num_inputs, offsets=offsets, bits=4)


def _q8_0(data: Bytes, num_inputs: int) -> QuantizedWeight:
    blocks = data.reshape(len(data), -1, Q8_0.block_bytes)
    return _quantized(blocks[:, :, 2:].view(np.int8), _floats(blocks[:, :, :2]), num_inputs, bits=8)


def _q4_k(data: Bytes, num_inputs: int) -> QuantizedWeight:
    """A block of 256 has eight groups, whose scales and offsets are 6-bit multiples of the block's."""
    blocks = data.reshape(len(data), -1, Q4_K.block_bytes)
    first, second, high = (blocks[:, :, begin : begin + 4] for begin in (4, 8, 12))
    multiples = np.concatenate((first & 63, (high & 15) | (first >> 2 & 48)), axis=2).astype(np.float32)
    depths = np.concatenate((second & 63, (high >> 4) | (second >> 2 & 48)), axis=2).astype(np.float32)
    return _quantized(
        _nibbles(blocks[:, :, 16:].reshape(len(data), -1, 32)),
        _floats(blocks[:, :, :2])[:, :, None] * multiples,
        num_inputs,
        offsets=-(_floats(blocks[:, :, 2:4])[:, :, None] * depths),
        bits=4,
    )


def _q6_k(data: Bytes, num_inputs: int) -> QuantizedWeight:
    """A block of 256 has 16 groups. The low four bits and the high two bits of a code are stored separately."""
    blocks = data.reshape(len(data), -1, Q6_K.block_bytes)
    rows = len(data)
    low = _nibbles(blocks[:, :, :128].reshape(rows, -1, 64))
    high = blocks[:, :, 128:192].reshape(rows, -1, 1, 32) >> np.array([[0], [2], [4], [6]], dtype=np.uint8) & 3
    codes = (low.reshape(rows, -1) | high.reshape(rows, -1).view(np.int8) << 4) - np.int8(32)
    scales = _floats(blocks[:, :, 208:])[:, :, None] * blocks[:, :, 192:208].view(np.int8).astype(np.float32)
    return _quantized(codes, scales, num_inputs, bits=8)


def _nibbles(data: Bytes) -> np.ndarray[Any, np.dtype[np.int8]]:
    """[rows, blocks, bytes]: a block's low nibbles, then its high ones."""
    return np.concatenate((data & 15, data >> 4), axis=2).view(np.int8)


def _floats(data: Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[rows, blocks, 2] of float16 → [rows, blocks]"""
    return np.ascontiguousarray(data).view(np.float16)[:, :, 0].astype(np.float32)


def _quantized(
    codes: np.ndarray[Any, np.dtype[np.int8]],
    scales: np.ndarray[Any, np.dtype[np.float32]],
    num_inputs: int,
    *,
    offsets: np.ndarray[Any, np.dtype[np.float32]] | None = None,
    bits: int,
) -> QuantizedWeight:
    import torch

    from headway.layers.quantized_weight import QuantizedWeight

    rows = len(codes)
    own = torch.from_numpy(np.ascontiguousarray(codes).reshape(rows, num_inputs))
    by_group = [None if part is None else torch.from_numpy(part.reshape(rows, -1)) for part in (scales, offsets)]
    assert by_group[0] is not None
    return QuantizedWeight(
        own,
        by_group[0],
        offsets=by_group[1],
        tile=(1, num_inputs // by_group[0].shape[1]),
        bits=bits,
        lowest=-8 if offsets is None else 0,
    )


PACKED_TYPES = {Q4_0: _q4_0, Q4_1: _q4_1, Q8_0: _q8_0, Q4_K: _q4_k, Q6_K: _q6_k}
"""The types whose weights stay codes, and their readers: (uint8 [rows, bytes], inputs of a row) → a weight."""


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
    """The configuration, except the rope frequency factors, which are a tensor."""
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
    """The metadata whose keys begin with one architecture's name, by the rest of the key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        prefix = architecture + "."
        mine = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(mine, f"{file.path}: {architecture}")

    def get(self, key: str) -> Any:
        return self.values.get(key)


def _declared_dtype(file: GGUFFile) -> str:
    """The dtype of a file's floats. For quantised files it is bfloat16, in which no model overflows."""
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
