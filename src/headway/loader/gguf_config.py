"""From GGUF metadata to a `DecoderConfig`, by way of the configuration Hugging Face would have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.errors import MissingTensorError, UnsupportedModelError
from headway.loader.gguf_file import GGUFFile
from headway.models.decoder_config import DecoderConfig
from headway.models.raw_config import RawConfig
from headway.models.registry import cap_to_window, config_from_hf
from headway.models.rope_config import yarn_attention_factor

# GGUF's name of an architecture -> the class whose configuration it is. Mistral models are "llama" in GGUF.
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_FILE_TYPE_DTYPES = {0: "float32", 1: "float16"}


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
