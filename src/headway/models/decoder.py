"""The decoder: one definition for every supported family, in the vocabulary of `Ops`, `Linear` and attention.

    residual = embedding(tokens)
    for each layer:
        residual += o(attention(rotate(qkv(norm(residual)))))
        residual += down(swiglu(gate_up(norm(residual))))
    hidden = norm(residual)

What a projection adds to the residual may still be on its way as `delta` (see `layers/ops.py`); the next norm takes it.
Families differ only in what is present (biases, head norms) and in numbers, all of which `DecoderConfig` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.attention.base import AttentionBackend
from headway.layers.heads import HeadNorms, Heads
from headway.layers.ops import Delta, Linear, Ops
from headway.models.decoder_config import DecoderConfig


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; q, k and v are one projection, gate and up are another."""

    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
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
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, cos_sin, config.rms_norm_eps)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted_rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states of the step that `attention` has planned; writes the step's keys and values.

        token_ids and positions are int64 [T], in the order of the planned batch. `wanted_rows`, int64 indices into
        them, names the tokens whose hidden state is needed, in the order of the result; what follows the last layer's
        attention is computed for these alone. `None`: all. Returns [T or len(wanted_rows), hidden].
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        last_layer = len(self.layers) - 1
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        residual = ops.embedding(token_ids, self.embedding)
        delta: Delta = None
        for index, layer in enumerate(self.layers):
            qkv = ops.norm_linear(residual, delta, layer.input_norm, eps, layer.qkv)
            attended = self._attend(index, layer, qkv, positions, attention)
            if index == last_layer and wanted_rows is not None:
                if not len(wanted_rows):
                    return residual[:0]
                # The norm before qkv has taken delta, so the residual is whole.
                attended, residual = attended.index_select(0, wanted_rows), residual.index_select(0, wanted_rows)
            delta = ops.linear_add(attended, layer.o, residual, layer.post_attention_norm)
            activated = ops.norm_swiglu(residual, delta, layer.post_attention_norm, eps, layer.gate_up)
            delta = ops.linear_add(activated, layer.down, residual, next_norms[index])
        return ops.norm(residual, delta, self.norm, eps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of `forward`'s result [R, hidden] -> [R, vocab], in the dtype the model computes in.

        Nothing is widened here: a sampler may read them as they are. Who sums or compares probabilities wants float32.
        `out` [R, vocab] is where they are written, if given.
        """
        return self.ops.linear(hidden, self.lm_head, out)

    def _attend(
        self, index: int, layer: DecoderLayer, qkv: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """Rotate, write keys and values, attend: in one where the backend can, for the step it has planned."""
        if attention.takes_qkv:
            return attention.run_qkv(index, qkv, self._heads, layer.head_norms)
        kv, slot_mapping = attention.kv_caches[index], attention.batch.slot_mapping
        return attention.run(
            index, self.ops.rope_write_kv(qkv, positions, slot_mapping, self._heads, layer.head_norms, kv)
        )

    @property
    def num_bytes(self) -> int:
        """Memory held by the weights and the rotary table."""
        tensors = [self.embedding, self.norm, self.cos_sin]
        linears: list[Linear] = [self.lm_head]
        for layer in self.layers:
            tensors += [layer.input_norm, layer.post_attention_norm]
            if layer.head_norms is not None:
                tensors += [layer.head_norms.q, layer.head_norms.k]
            linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
        shared = self.embedding.nbytes if getattr(self.lm_head, "weight", None) is self.embedding else 0
        return sum(t.nbytes for t in tensors) + sum(linear.num_bytes for linear in linears) - shared
