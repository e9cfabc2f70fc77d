"""Rotary tables: the angle of every position and frequency, with the scalings that stretch a context.

The frequencies of a head of D elements are theta^(-2i/D), i < D/2. They are computed in float32 and in the same order
as Hugging Face transformers does, since at position 8,000 a last-bit difference in a frequency is visible.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.errors import CorruptModelError
from headway.models.decoder_config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def build_cos_sin(rope: RopeConfig, head_dim: int, num_positions: int, *, device: torch.device | str = "cpu") -> Tensor:
    """float32 [num_positions, head_dim]: in each row the cosines of the head_dim / 2 pairs, then their sines."""
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * scaled_frequencies(rope, head_dim)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(device)


def scaled_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the head_dim / 2 pairs, float32."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    base = 1.0 / powers
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
            return _llama3_frequencies(base, scaling)
        case YarnScaling() as scaling:
            return _yarn_frequencies(powers, rope.theta, head_dim, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide frequencies that turn rarely within the original context by `factor`, keep fast ones, blend between."""
    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position
    wavelength = 2 * math.pi / frequencies
    ramp = (original / wavelength - low) / (high - low)
    blended = (1 - ramp) * frequencies / factor + ramp * frequencies
    kept_or_blended = torch.where(wavelength < original / high, frequencies, blended)
    return torch.where(wavelength > original / low, frequencies / factor, kept_or_blended)


def _yarn_frequencies(powers: Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> Tensor:
    """Pairs turning more than beta_fast times keep their frequency, fewer than beta_slow divide it by `factor`."""

    def pair_turning(times: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept
