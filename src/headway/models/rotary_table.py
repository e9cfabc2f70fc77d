"""The rotary table a `DecoderConfig` asks for."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from headway.errors import CorruptModelError
from headway.layers.rotary import cos_sin_table, inverse_frequencies, llama3_frequencies, yarn_frequencies
from headway.models.decoder_config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def scaled_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the head_dim / 2 pairs, float32."""
    base = inverse_frequencies(rope.theta, head_dim)
    match rope.scaling:
        case None:
            return base
        case LinearScaling(factor=factor):
            return base / factor
        case FrequencyFactors(factors=factors):
            if len(factors) != head_dim // 2:
                raise CorruptModelError(f"{len(factors)} rope frequency factors for a head of {head_dim} elements")
            return base / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return llama3_frequencies(base, **asdict(scaling))
        case YarnScaling() as scaling:
            return yarn_frequencies(
                rope.theta,
                head_dim,
                factor=scaling.factor,
                original_max_position=scaling.original_max_position,
                beta_fast=scaling.beta_fast,
                beta_slow=scaling.beta_slow,
                truncate=scaling.truncate,
            )


def build_cos_sin(rope: RopeConfig, head_dim: int, num_positions: int, *, device: torch.device | str = "cpu") -> Tensor:
    """float32 [num_positions, head_dim]: cosines | sines."""
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return cos_sin_table(scaled_frequencies(rope, head_dim), num_positions, scale).to(device)
