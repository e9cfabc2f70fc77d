"""Reading rotary positions from a config.json, in the old spelling and the new one.

Old: `rope_theta` beside an optional `rope_scaling` object. New (transformers 5): one `rope_parameters` object with
`rope_theta`, `rope_type` and the parameters of that type.
"""

from __future__ import annotations

import math

from headway.errors import UnsupportedModelError
from headway.models.decoder_config import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from headway.models.raw_config import RawConfig

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_from_hf(raw: RawConfig, max_position: int) -> RopeConfig:
    """Theta and scaling of a model whose declared context is `max_position`."""
    parameters = raw.section("rope_scaling") or raw.section("rope_parameters") or RawConfig({}, raw.source)
    if any(isinstance(value, dict) for value in parameters.values.values()):
        raise UnsupportedModelError(f"{parameters.source}: different rotary positions per layer are not supported")
    rotated = parameters.number("partial_rotary_factor", raw.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedModelError(f"{parameters.source}: rotating only {rotated:g} of each head is not supported")
    theta = parameters.number("rope_theta", raw.number("rope_theta", 10000.0))
    return RopeConfig(theta=theta, scaling=_scaling(parameters, raw, max_position))


def extended_context(rope: RopeConfig, max_position: int) -> int:
    """The context of a model that declares `max_position`. With YaRN files mostly declare what they were trained with
    before, and extend it by the factor; other kinds of scaling come with the context they were made for."""
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
