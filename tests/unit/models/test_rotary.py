"""Rotary frequencies and tables equal transformers' to the last bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headway.errors import CorruptModelError
from headway.models.assembly import build_cos_sin, scaled_frequencies
from headway.models.decoder_config import FrequencyFactors, RopeConfig, YarnScaling
from headway.models.hf_config import config_from_hf

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama31": {**LLAMA31, "rope_theta": 500000.0},
    "llama32": {**LLAMA31, "rope_theta": 500000.0, "factor": 32.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_all": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.9,
    },
}


def make_config(rope: dict[str, Any], head_dim: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=4 * head_dim,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=dict(rope),
    )


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", list(ROPES))
def test_matches_transformers(name: str, head_dim: int) -> None:
    reference = make_config(ROPES[name], head_dim)
    rope = config_from_hf({**reference.to_dict(), "architectures": ["LlamaForCausalLM"]}, "config.json").rope
    if name != "default":
        expected, _ = ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]](reference)
        assert torch.equal(scaled_frequencies(rope, head_dim), expected)
    positions = torch.tensor([[0, 1, 7, 511, 8191]])
    cos, sin = LlamaRotaryEmbedding(reference)(torch.empty(1), positions)
    half = head_dim // 2
    table = build_cos_sin(rope, head_dim, 8192)
    assert table.shape == (8192, head_dim)
    assert torch.equal(table[positions[0], :half], cos[0, :, :half])
    assert torch.equal(table[positions[0], half:], sin[0, :, :half])


def test_frequency_factors_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(CorruptModelError, match="3 rope frequency factors for a head of 16"):
        scaled_frequencies(RopeConfig(scaling=FrequencyFactors((1.0, 2.0, 3.0))), 16)


YARN = {"rope_type": "yarn", "factor": 4.0}
QWEN25 = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("declared", "rope", "context"),
    [
        (32768, {"rope_scaling": QWEN25}, 131072),
        (40960, {"rope_scaling": {**QWEN25, "rope_type": "yarn"}}, 131072),
        (131072, {"rope_scaling": QWEN25}, 131072),
        (163840, {"rope_scaling": QWEN25}, 163840),
        (32768, {"rope_scaling": {**QWEN25, "factor": 1.5}}, 49152),
        (32768, {"rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072),
        (65536, {"rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 4096}}, 65536),
        (8192, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 8192),
        (131072, {"rope_scaling": LLAMA31}, 131072),
        (32768, {}, 32768),
    ],
)
def test_yarn_extends_the_context_by_its_factor(declared: int, rope: dict[str, Any], context: int) -> None:
    """What a file declares with YaRN is mostly what it was trained with before; a factor of 4 makes 4 times that."""
    raw = make_config(ROPES["default"], 64).to_dict() | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    del raw["rope_parameters"]
    config = config_from_hf({**raw, "max_position_embeddings": declared, **rope}, "config.json")
    assert config.max_position == context
    scaling = config.rope.scaling
    if isinstance(scaling, YarnScaling):
        reference = transformers.Qwen2Config(
            hidden_size=256, num_attention_heads=4, max_position_embeddings=declared, **copy.deepcopy(rope)
        )
        expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](reference)
        assert torch.equal(scaled_frequencies(config.rope, 64), expected)
        assert scaling.attention_factor == attention_factor
