"""What a model costs in bytes and flops, from its shape and its number formats alone.

W   bytes of all weights that a step multiplies with: every layer and the output projection, not the embedding table
    (of which a step reads one row per token)
K   bytes of keys and values of one token, over all layers
P   weights in the layers;  q  query width (heads × head size);  V, H  vocabulary and hidden size

flops of a token        2·P
flops of a pair         4·q·layers      a query and a key: query·key and weight·value, 2 flops per multiply-add
flops of an output row  2·V·H
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.models.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What one model costs per step and per token: `W`, `K` and the flops above."""

    weight_bytes: float
    kv_bytes_per_token: float
    linear_flops_per_token: float
    attention_flops_per_pair: float
    """Flops for one query and one key, over all layers and heads."""
    output_flops: float
    """The output projection of one token."""
    output_bytes: float = 0.0
    """The part of `weight_bytes` that belongs to the output projection, which a step without sampled rows leaves
    out."""

    def prompt_flops(self, length: int) -> float:
        """The arithmetic of a whole prompt."""
        pairs = length * (length + 1) / 2
        return self.linear_flops_per_token * length + self.attention_flops_per_pair * pairs + self.output_flops


def model_costs(model: DecoderConfig, *, bytes_per_weight: float, kv_bytes_per_token: float) -> ModelCosts:
    """The costs of a model. Norms and biases, less than a thousandth of the weights, are left out."""
    layer = model.hidden_size * (model.qkv_size + model.q_size + 3 * model.intermediate_size)
    layers = layer * model.num_layers
    output = model.vocab_size * model.hidden_size
    return ModelCosts(
        weight_bytes=(layers + output) * bytes_per_weight,
        kv_bytes_per_token=kv_bytes_per_token,
        linear_flops_per_token=2.0 * layers,
        attention_flops_per_pair=4.0 * model.q_size * model.num_layers,
        output_flops=2.0 * output,
        output_bytes=output * bytes_per_weight,
    )
