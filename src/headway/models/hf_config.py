"""Turns a config.json into a `DecoderConfig`: which architectures are known, and how each one's file is read.

A family is a function of `RawConfig`. To add one: write that function, and name it in `_HF_FAMILIES` (the class names
in a config.json's `architectures`), list the keys of its configuration class in `hf_config_keys.py` and, if llama.cpp
knows it, name it in `loader/gguf_checkpoint.py` (its `general.architecture`).

Rotary positions have an old spelling, `rope_theta` beside an optional `rope_scaling` object, and a new one
(transformers 5): one `rope_parameters` object with `rope_theta`, `rope_type` and the parameters of that type.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.models.decoder_config import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from headway.models.hf_config_keys import KEYS_OF_ARCHITECTURE
from headway.models.known_keys import check_keys

logger = logging.getLogger(__name__)

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_REQUIRED: Any = object()


class RawConfig:
    """A mapping whose getters raise `CorruptModelError` naming the file, the key and what is wrong with it."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, value, "a positive integer")
        return value

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """A positive integer, or None if the file says null (or lacks the key and `default` is None)."""
        if key in self.values and self.values[key] is None:
            return None
        return None if default is None and key not in self.values else self.integer(key, default or 0)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None) -> str | None:
        value = self._get(key, default)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def section(self, key: str) -> RawConfig | None:
        """A nested object, or None if it is absent, null or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return RawConfig(value, f"{self.source}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CorruptModelError(f"{self.source} does not say {key!r}")
        return default

    def _wrong(self, key: str, value: Any, wanted: str) -> CorruptModelError:
        return CorruptModelError(f"{self.source}: {key!r} is {value!r}, which is not {wanted}")


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
    config = _common(raw, "mistral", max_position=4096 * 32, num_kv_heads=8)
    return cap_to_window(config, raw.optional_integer("sliding_window", 4096))


def _qwen2(raw: RawConfig) -> DecoderConfig:
    return replace(_common(raw, "qwen2", max_position=32768, num_kv_heads=32), qkv_bias=True)


def _qwen3(raw: RawConfig) -> DecoderConfig:
    attention_bias = raw.boolean("attention_bias", False)
    config = _common(raw, "qwen3", max_position=32768, num_kv_heads=32, head_dim=128)
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
    architecture = _architecture(raw, source)
    check_keys(source, raw, KEYS_OF_ARCHITECTURE[architecture], ignores_unknown=True)
    return _HF_FAMILIES[architecture](RawConfig(raw, source))


def cap_to_window(config: DecoderConfig, window: int | None) -> DecoderConfig:
    """Limit the context to the sliding window: up to that length, windowed and full attention are the same."""
    if window is None or window <= 0 or window >= config.max_position:
        return config
    logger.warning(
        "sliding-window attention is not implemented: the context is limited to the window, %d of %d tokens",
        window,
        config.max_position,
    )
    return replace(config, max_position=window)


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    listed, model_type = raw.get("architectures"), raw.get("model_type")
    if isinstance(listed, list) and listed:
        for name in listed:
            if name in SUPPORTED_ARCHITECTURES:
                if model_type is not None and _MODEL_TYPES.get(str(model_type)) != name:
                    raise CorruptModelError(f"{source}: architecture {name} contradicts model_type {model_type!r}")
                return str(name)
        found = ", ".join(str(name) for name in listed)
    else:
        if model_type is None:
            raise CorruptModelError(
                f"{source} names neither `architectures` nor a `model_type`; is it a model's config?"
            )
        if str(model_type) in _MODEL_TYPES:
            return _MODEL_TYPES[str(model_type)]
        found = str(model_type)
    raise UnsupportedModelError(
        f"{source}: architecture {found} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _common(
    raw: RawConfig,
    architecture: str,
    *,
    max_position: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> DecoderConfig:
    """Read the keys that all families share. `max_position`, `num_kv_heads` (None: as many as heads) and `head_dim`
    (None: from the hidden size) are the family's defaults."""
    activation = raw.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{raw.source}: activation {activation!r} is not supported; only silu is")
    hidden_size = raw.integer("hidden_size")
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.optional_integer("num_key_value_heads", num_kv_heads) or num_heads
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


def rope_from_hf(raw: RawConfig, max_position: int) -> RopeConfig:
    """Read theta and scaling for a model whose declared context is `max_position`."""
    parameters = raw.section("rope_scaling") or raw.section("rope_parameters") or RawConfig({}, raw.source)
    if any(isinstance(value, dict) for value in parameters.values.values()):
        raise UnsupportedModelError(f"{parameters.source}: different rotary positions per layer are not supported")
    rotated = parameters.number("partial_rotary_factor", raw.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedModelError(f"{parameters.source}: rotating only {rotated:g} of each head is not supported")
    theta = parameters.number("rope_theta", raw.number("rope_theta", 10000.0))
    return RopeConfig(theta=theta, scaling=_scaling(parameters, raw, max_position))


def extended_context(rope: RopeConfig, max_position: int) -> int:
    """The context of a model that declares `max_position`. Files with YaRN mostly declare the length before extension,
    which the factor multiplies; files with other kinds of scaling declare the extended length."""
    if not isinstance(rope.scaling, YarnScaling):
        return max_position
    return max(max_position, int(rope.scaling.original_max_position * rope.scaling.factor))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's rule for how much sharper attention must be when the context is `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaling(parameters: RawConfig, raw: RawConfig, max_position: int) -> RopeScaling | None:
    rope_type = parameters.text("rope_type", None) or parameters.text("type", None) or "default"
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearScaling(parameters.number("factor"))
    if rope_type == "llama3":
        return Llama3Scaling(
            factor=parameters.number("factor"),
            low_freq_factor=parameters.number("low_freq_factor"),
            high_freq_factor=parameters.number("high_freq_factor"),
            original_max_position=_original_max_position(parameters, raw, max_position),
        )
    if rope_type == "yarn":
        return _yarn(parameters, _original_max_position(parameters, raw, max_position), max_position)
    raise UnsupportedModelError(
        f"{parameters.source}: rope type {rope_type!r} is not supported; "
        f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
    )


def _original_max_position(parameters: RawConfig, raw: RawConfig, max_position: int) -> int:
    key = "original_max_position_embeddings"
    return raw.integer(key, parameters.integer(key, max_position))


def _yarn(parameters: RawConfig, original_max_position: int, max_position: int) -> YarnScaling:
    factor = parameters.number("factor", max_position / original_max_position)
    if parameters.values.get("mscale") and parameters.values.get("mscale_all_dim"):
        resolved = yarn_attention_factor(factor, parameters.number("mscale"))
        resolved /= yarn_attention_factor(factor, parameters.number("mscale_all_dim"))
    else:
        resolved = yarn_attention_factor(factor)
    return YarnScaling(
        factor=factor,
        original_max_position=original_max_position,
        attention_factor=parameters.number("attention_factor", resolved),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.boolean("truncate", True),
    )
