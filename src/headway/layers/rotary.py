"""Rotary tables: the angle of every position and frequency, with the scalings that stretch a context.

The frequencies of a head of D elements are theta^(-2i/D), i < D/2. They are computed in float32 and in the same order
as Hugging Face transformers does, since at position 8,000 a last-bit difference in a frequency is visible.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(theta: float, head_dim: int) -> Tensor:
    """Radians per position of each of the head_dim / 2 pairs, float32."""
    return 1.0 / _powers(theta, head_dim)


def llama3_frequencies(
    frequencies: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> Tensor:
    """Divide frequencies that turn rarely within the original context by `factor`, keep fast ones, blend between."""
    wavelength = 2 * math.pi / frequencies
    turns = original_max_position / wavelength
    ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - ramp) * frequencies / factor + ramp * frequencies
    kept_or_blended = torch.where(wavelength < original_max_position / high_freq_factor, frequencies, blended)
    return torch.where(wavelength > original_max_position / low_freq_factor, frequencies / factor, kept_or_blended)


def yarn_frequencies(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    original_max_position: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """Pairs turning more than beta_fast times keep their frequency, fewer than beta_slow divide it by `factor`."""

    def pair_turning(times: float) -> float:
        return head_dim * math.log(original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(beta_fast), pair_turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(theta, head_dim)
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def cos_sin_table(frequencies: Tensor, num_positions: int, scale: float = 1.0) -> Tensor:
    """float32 [num_positions, head_dim]: in each row D/2 cosines, then D/2 sines, times `scale`."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


def _powers(theta: float, head_dim: int) -> Tensor:
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
