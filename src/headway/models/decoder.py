"""The decoder: one definition for every supported family, in the vocabulary of `Ops`, `Linear` and attention.

    residual = embedding(tokens)
    for each layer:
        residual += attention(norm(residual))
        residual += mlp(norm(residual))
    hidden = norm(residual)

The addition and the norm that follows it are one operation, so each layer ends with the norm of the next one.
Families differ only in what is present (biases, head norms) and in numbers, all of which `DecoderConfig` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.attention.base import AttentionBackend
from headway.layers.ops import Linear, Ops
from headway.models.config import DecoderConfig


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; q, k and v are one projection, gate and up are another."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A model that is ready to run. Stateless: the KV cache belongs to the attention backend."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        ops: Ops,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        lm_head: Linear,
        cos_sin: Tensor,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.cos_sin = cos_sin

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Hidden states [T, hidden] of the step that `attention` has planned; writes the step's keys and values.

        token_ids and positions are int64 [T], in the order of the planned batch.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        residual = ops.embedding(token_ids, self.embedding)
        norms = [layer.input_norm for layer in self.layers] + [self.norm]
        hidden = ops.rms_norm(residual, norms[0], eps)
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, hidden, positions, attention)
            hidden = ops.add_rms_norm(attended, residual, layer.post_attention_norm, eps)
            fed_forward = layer.down(ops.silu_mul(layer.gate_up(hidden)))
            hidden = ops.add_rms_norm(fed_forward, residual, norms[index + 1], eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [R, hidden] -> float32 [R, vocab]."""
        return self.lm_head(hidden).float()

    @property
    def num_bytes(self) -> int:
        """Memory held by the weights and the rotary table."""
        tensors = [self.embedding, self.norm, self.cos_sin]
        linears: list[Linear] = [self.lm_head]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.post_attention_norm]
            tensors += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
            linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
        shared = self.embedding.nbytes if getattr(self.lm_head, "weight", None) is self.embedding else 0
        return sum(t.nbytes for t in tensors) + sum(linear.num_bytes for linear in linears) - shared

    def _attend(
        self, index: int, layer: DecoderLayer, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> Tensor:
        config = self.config
        q = self.ops.rope_write_kv(
            layer.qkv(hidden),
            positions,
            self.cos_sin,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            attention.kv_caches[index],
            attention.batch.slot_mapping,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        return layer.o(attention.run(index, q))
