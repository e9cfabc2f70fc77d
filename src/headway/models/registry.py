"""Which architectures are known, and how each one's raw configuration becomes a `DecoderConfig`.

A family is a function of `RawConfig`. To add one: write that function, and name it in `_HF_FAMILIES` (the class names
in a config.json's `architectures`) and, if llama.cpp knows it, in `_GGUF_FAMILIES` (its `general.architecture`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.models.decoder_config import DecoderConfig
from headway.models.raw_config import RawConfig
from headway.models.rope_config import extended_context, rope_from_hf

logger = logging.getLogger(__name__)

Family = Callable[[RawConfig], DecoderConfig]


def _llama(raw: RawConfig) -> DecoderConfig:
    attention_bias = raw.boolean("attention_bias", False)
    return replace(
        _common(raw, "llama", max_position=2048),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=raw.boolean("mlp_bias", False),
    )


def _mistral(raw: RawConfig) -> DecoderConfig:
    config = _common(raw, "mistral", max_position=4096 * 32)
    return cap_to_window(config, raw.optional_integer("sliding_window", 4096))


def _qwen2(raw: RawConfig) -> DecoderConfig:
    _refuse_sliding_window(raw, "Qwen2")
    return replace(_common(raw, "qwen2", max_position=32768), qkv_bias=True)


def _qwen3(raw: RawConfig) -> DecoderConfig:
    _refuse_sliding_window(raw, "Qwen3")
    attention_bias = raw.boolean("attention_bias", False)
    config = _common(raw, "qwen3", max_position=32768, head_dim=128)
    return replace(config, qk_norm=True, qkv_bias=attention_bias, o_bias=attention_bias)


_HF_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}

_MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

SUPPORTED_ARCHITECTURES = tuple(_HF_FAMILIES)


def config_from_hf(raw: Mapping[str, Any], source: str) -> DecoderConfig:
    """Normalise the contents of a config.json; `source` names the file in errors."""
    _refuse_quantised(raw, source)
    config = RawConfig(raw, source)
    return _HF_FAMILIES[_architecture(raw, source)](config)


def cap_to_window(config: DecoderConfig, window: int | None) -> DecoderConfig:
    """Limit the context to the sliding window: up to there, windowed and full attention are the same."""
    if window is None or window <= 0 or window >= config.max_position:
        return config
    logger.warning(
        "sliding-window attention is not implemented: the context is limited to the window, %d of %d tokens",
        window,
        config.max_position,
    )
    return replace(config, max_position=window)


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    listed = raw.get("architectures")
    if isinstance(listed, list) and listed:
        for name in listed:
            if name in _HF_FAMILIES:
                return str(name)
        found = ", ".join(str(name) for name in listed)
    else:
        model_type = raw.get("model_type")
        if model_type is None:
            raise CorruptModelError(
                f"{source} names neither `architectures` nor a `model_type`; is it a model's config?"
            )
        if model_type in _MODEL_TYPES:
            return _MODEL_TYPES[str(model_type)]
        found = str(model_type)
    raise UnsupportedModelError(
        f"{source}: architecture {found} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _common(raw: RawConfig, architecture: str, *, max_position: int, head_dim: int | None = None) -> DecoderConfig:
    """What all families share. `max_position` and `head_dim` are the family's defaults."""
    activation = raw.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{raw.source}: activation {activation!r} is not supported; only silu is")
    hidden_size = raw.integer("hidden_size")
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.optional_integer("num_key_value_heads", None) or num_heads
    head_dim = raw.optional_integer("head_dim", head_dim) or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise CorruptModelError(
            f"{raw.source}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise CorruptModelError(f"{raw.source}: head_dim {head_dim} is odd; rotary positions need pairs")
    max_position = raw.integer("max_position_embeddings", max_position)
    rope = rope_from_hf(raw, max_position)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=extended_context(rope, max_position),
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        tie_embeddings=raw.boolean("tie_word_embeddings", False),
        rope=rope,
        torch_dtype=_declared_dtype(raw),
    )


def _declared_dtype(raw: RawConfig) -> str:
    name = raw.text("dtype", None) or raw.text("torch_dtype", None) or "float32"
    name = name.removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModelError(
            f"{raw.source}: weights of dtype {name} are not supported; use a float32, float16 or bfloat16 checkpoint"
        )
    return name


def _refuse_quantised(raw: Mapping[str, Any], source: str) -> None:
    quantised = raw.get("quantization_config") or raw.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise UnsupportedModelError(
            f"{source}: the checkpoint is quantised with {method}, which is not supported; "
            "use the original float checkpoint, or a GGUF file of it"
        )


def _refuse_sliding_window(raw: RawConfig, family: str) -> None:
    if raw.boolean("use_sliding_window", False):
        raise UnsupportedModelError(
            f"{raw.source}: {family} with use_sliding_window=true is not supported; "
            "set it to false to run with full attention"
        )
