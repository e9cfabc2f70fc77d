"""Configurations: what each family's config.json means, and every refusal names its reason."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import transformers

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.models.decoder_config import DecoderConfig, Llama3Scaling, RopeConfig
from headway.models.hf_config import SUPPORTED_ARCHITECTURES, config_from_hf
from headway.models.hf_config_keys import KEYS_OF_ARCHITECTURE

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
}


def parse(**changes: Any) -> DecoderConfig:
    return config_from_hf({**LLAMA, **changes}, "config.json")


def test_llama() -> None:
    assert parse() == DecoderConfig(
        architecture="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        max_position=1024,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5000.0),
        torch_dtype="bfloat16",
    )


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 512}
NO_BIAS = {"use_sliding_window": False, "sliding_window": 64}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3},
            {"rope": RopeConfig(5000.0, Llama3Scaling(8.0, 1.0, 4.0, 512))},
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"]} | NO_BIAS,
            {"qkv_bias": True, "o_bias": False, "qk_norm": False, "max_position": 1024},
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
            {"qk_norm": True, "qkv_bias": False, "head_dim": 32, "q_size": 256},
        ),
        ({"architectures": None, "model_type": "qwen2"}, {"architecture": "qwen2"}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 8}),
        ({"torch_dtype": None, "dtype": "float16"}, {"torch_dtype": "float16"}),
    ],
)
def test_what_keys_mean(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """A key that is `None` here is absent."""
    raw = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    config = config_from_hf(raw, "config.json")
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(("window", "max_position"), [(None, 1024), (4096, 1024), (1024, 1024), (256, 256)])
def test_mistral_context_stays_within_the_window(
    window: int | None, max_position: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse(architectures=["MistralForCausalLM"], sliding_window=window)
    assert config.max_position == max_position
    assert ("256 of 1024" in caplog.text) == (max_position == 256)


def test_sizes() -> None:
    config = parse(attention_bias=True, mlp_bias=True)
    assert config.kv_bytes_per_token(2) == 2 * 3 * 2 * 8 * 2
    attention = 64 * (64 + 16 + 16) + 96 + 64 * 64 + 64
    mlp = 3 * 64 * 96 + 96 + 96 + 64
    assert config.num_parameters == 2 * 128 * 64 + 3 * (attention + mlp + 128) + 64


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"])
def test_unknown_architecture_is_named(architecture: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(architectures=[architecture])
    assert architecture in str(caught.value)
    assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer"),
        ({"partial_rotary_factor": 0.5}, "rotating only 0.5 of each head"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "only 0.25"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "'layer_types' has sliding_attention, which is not supported",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": "linear"}, "'layer_types' has 'linear'"),
        ({"is_encoder_decoder": True}, "'is_encoder_decoder' is True"),
        ({"per_layer_config": {"0": {"num_attention_heads": 2}}}, "'per_layer_config' is"),
    ],
)
def test_unsupported_features(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "names neither"),
        ({"hidden_size": None}, "does not say 'hidden_size'"),
        ({"num_hidden_layers": "three"}, "'num_hidden_layers' is 'three', which is not a positive integer"),
        ({"vocab_size": 0}, "'vocab_size' is 0"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rope_scaling": [1]}, "'rope_scaling' is \\[1\\]"),
        ({"rope_scaling": {"type": "linear"}}, "does not say 'factor'"),
        ({"hidden_act": 3}, "'hidden_act' is 3"),
        ({"model_type": "granite"}, "architecture LlamaForCausalLM contradicts model_type 'granite'"),
        ({"model_type": ["llama"]}, "contradicts model_type"),
    ],
)
def test_contradictory_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModelError, match=message):
        parse(**changes)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_key_of_the_configuration_class_has_a_rule(architecture: str) -> None:
    """A release of transformers with a key more says so here."""
    made = getattr(transformers, architecture.replace("ForCausalLM", "Config"))()
    fields = {field.name for field in dataclasses.fields(made)}
    outside = {"head_dim", "per_layer_config"}  # read of any class
    assert fields | outside == KEYS_OF_ARCHITECTURE[architecture].keys()
    raw = {**made.to_dict(), "architectures": [architecture]}
    assert config_from_hf(raw, "config.json").num_kv_heads == made.num_key_value_heads


@pytest.mark.parametrize(
    ("architecture", "foreign"),
    [
        ("LlamaForCausalLM", {"use_sliding_window": True, "layer_types": ["sliding_attention"], "logits_scaling": 8.0}),
        ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True, "layer_types": ["sliding_attention"]}),
        ("Qwen2ForCausalLM", {"attention_bias": False, "pretraining_tp": 4, "residual_multiplier": 0.2}),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 3, "max_window_layers": 1, "sliding_window": 4}),
    ],
)
def test_keys_of_other_architectures_mean_nothing(architecture: str, foreign: dict[str, Any]) -> None:
    assert parse(architectures=[architecture], **foreign) == parse(architectures=[architecture])


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_absent_keys_have_the_defaults_of_the_class(architecture: str) -> None:
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw: dict[str, Any] = {key: LLAMA[key] for key in needed} | {"num_attention_heads": 64, "hidden_size": 512}
    made = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**raw)
    config = config_from_hf(raw | {"architectures": [architecture]}, "config.json")
    head_dim = getattr(made, "head_dim", None) or raw["hidden_size"] // raw["num_attention_heads"]
    assert (config.num_kv_heads, config.head_dim) == (made.num_key_value_heads, head_dim)
    assert (config.rms_norm_eps, config.tie_embeddings) == (made.rms_norm_eps, made.tie_word_embeddings)
    assert config.rope.theta == made.rope_parameters["rope_theta"]


def test_describing_a_model_needs_no_torch() -> None:
    code = "import sys, headway.models.hf_config; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
