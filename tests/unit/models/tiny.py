"""Tiny random models of every family, as Hugging Face models, as folders, and as GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize

VOCAB_SIZE = 96

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name -> (configuration class, what differs from _COMMON)
FAMILIES: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": (transformers.LlamaConfig, {"rope_parameters": LINEAR_ROPE}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama_yarn": (transformers.LlamaConfig, {"rope_parameters": YARN_ROPE}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (transformers.Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
}


def hf_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A float32 transformers model with random weights; norms and biases are random too, so that no two are alike."""
    make_config, differences = FAMILIES[family]
    torch.manual_seed(seed)
    config = make_config(**{**_COMMON, **differences, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def hf_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position, [T, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def save_folder(model: Any, folder: Path, **options: Any) -> Path:
    """`save_pretrained` into `folder`."""
    model.save_pretrained(folder, **options)
    return folder


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def save_gguf(
    model: Any,
    path: Path,
    *,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType | None = None,
    metadata: Mapping[str, tuple[str, Any]] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    skip_tensors: tuple[str, ...] = (),
    blocks: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter does; `metadata` maps a key to (type as GGUFWriter names it, value).
    `blocks`: what takes the place of tensors, by their names in the model."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"<token {i}> é" for i in range(config.vocab_size)])
    for key, (kind, value) in (metadata or {}).items():
        getattr(writer, f"add_{kind}")(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    num_heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored in skip_tensors or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        data, kind = (blocks or {}).get(name, (tensor.numpy(), quantization if tensor.dim() == 2 else None))
        for part, count in num_heads.items():
            if architecture == "llama" and part in name:
                data = _halves_to_pairs(data, count)
        if kind is not None and data.dtype != np.uint8:
            data = quantize(data, kind)
        writer.add_tensor(stored, np.ascontiguousarray(data), raw_dtype=kind)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _halves_to_pairs(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Within each head, row i and row i + D/2 become neighbours."""
    rows = data.shape[0]
    order = np.arange(rows).reshape(num_heads, 2, rows // num_heads // 2).transpose(0, 2, 1).reshape(-1)
    return data[order]
